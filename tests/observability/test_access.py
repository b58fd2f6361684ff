"""What the access line tells of the engine; the rest is tested at the api (tests/server/test_access_log.py)."""

from mizzen.ipc.messages import Finish, Timings
from mizzen.observability.access import fields
from mizzen.observability.record import InferenceRecord, RequestRecord
from mizzen.sampling_params import SamplingParams


def line(*finishes: Finish) -> dict[str, object]:
    record = RequestRecord("POST", "/v1/completions", "an-id", 1000.0, lambda _: None, status=200)
    sampling = SamplingParams(n=len(finishes))
    record.inference = InferenceRecord("text_completion", "m", sampling, False, 1, sampling.n)
    record.admit()
    record.accept([7])
    for index, finish in enumerate(finishes):
        record.finish(index, finish)
    record.ended_s = 1001.0
    return fields(record)


def test_the_time_in_the_queue_is_that_of_the_first_choice_to_be_scheduled() -> None:
    late = Finish("stop", 7, 4, timings=Timings(queued_s=1000.25, scheduled_s=1000.75))
    soon = Finish("stop", 7, 4, timings=Timings(queued_s=1000.25, scheduled_s=1000.375))
    assert line(late, soon)["queue_s"] == 0.125


def test_a_request_that_was_never_scheduled_has_no_time_in_the_queue() -> None:
    assert "queue_s" not in line(Finish("abort", 7, 0, timings=Timings(queued_s=1000.25)))
