"""What the policy asks the loop to do, in order."""

from dataclasses import dataclass

from mizzen.ipc.messages import FromSupervisor, ModelInfo


@dataclass(frozen=True, slots=True)
class Spawn:
    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Kill:
    name: str


@dataclass(frozen=True, slots=True)
class Send:
    name: str
    message: FromSupervisor


@dataclass(frozen=True, slots=True)
class WriteModel:
    model: ModelInfo


@dataclass(frozen=True, slots=True)
class Log:
    """``event`` and its fields, at "info", "warning" or "error"."""

    level: str
    event: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True)
class LastWords:
    """The one line that says why the service ends without success: logged, and written to MIZZEN_TERMINATION_LOG."""

    message: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Exit:
    """All processes are gone."""

    code: int


Action = Spawn | Kill | Send | WriteModel | Log | LastWords | Exit
