"""Runs a hypothesis state machine until it has made so many steps: short in every test run, long in the slow ones."""

from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

STEPS_A_LIFE = 50


class CountedMachine(RuleBasedStateMachine):
    """Counts the steps of all its lives: an invariant of the machine adds one to ``steps_run``."""

    steps_run: ClassVar[int] = 0


def run_steps(machine: type[CountedMachine], steps: int, *, derandomize: bool) -> None:
    machine.steps_run = 0
    while machine.steps_run < steps:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max(1, steps // STEPS_A_LIFE),
                stateful_step_count=STEPS_A_LIFE,
                deadline=None,
                derandomize=derandomize,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
