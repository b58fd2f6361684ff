"""What ``mizzen top`` makes of a server's metrics."""

import contextlib
import http.server
import io
import math
import threading
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from mizzen.cli import main as cli
from mizzen.top.main import NoMetrics, main
from mizzen.top.view import render
from mizzen.top.window import Scrape, Window

COMMON = 'model_name="m",engine="0"'


def exposition(number: int, *, ready: int = 1) -> str:
    """As a server's after ``number`` seconds: ten tokens each, half of the first tokens within 0.1 s."""
    ttft = "mizzen_time_to_first_token_seconds"
    return f"""# TYPE mizzen_ready gauge
mizzen_ready{{{COMMON}}} {ready}
# TYPE mizzen_phase gauge
mizzen_phase{{{COMMON},phase="load"}} {1 - ready}
mizzen_phase{{{COMMON},phase="serve"}} {ready}
# TYPE mizzen_requests_waiting gauge
mizzen_requests_waiting{{{COMMON},reason="slots"}} 3
mizzen_requests_waiting{{{COMMON},reason="preempted"}} 2
# TYPE mizzen_generation_tokens_total counter
mizzen_generation_tokens_total{{{COMMON}}} {10 * number}
# TYPE {ttft} histogram
{ttft}_bucket{{{COMMON},le="0.1"}} {2 * number}
{ttft}_bucket{{{COMMON},le="0.2"}} {4 * number}
{ttft}_bucket{{{COMMON},le="+Inf"}} {4 * number}
{ttft}_sum{{{COMMON}}} {number}
{ttft}_count{{{COMMON}}} {4 * number}
# TYPE mizzen_process_ready gauge
mizzen_process_ready{{{COMMON},process="engine-0"}} {ready}
# TYPE mizzen_process_restarts_total counter
mizzen_process_restarts_total{{{COMMON},process="engine"}} 7
"""


def window(*numbers: int, length_s: float = 100.0) -> Window:
    made = Window(length_s)
    for at_s, number in enumerate(numbers):
        made.add(Scrape.parse(exposition(number), 50.0 + at_s))
    return made


def shown(made: Window, problem: str = "") -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render("http://there", made, problem))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert isinstance(text, str)
    return text


# ---- arithmetic ----


def test_a_rate_is_the_increase_by_the_time_between() -> None:
    assert window(5, 6, 7).rate("mizzen_generation_tokens_total") == 10.0


def test_a_counter_that_began_again_counts_from_zero() -> None:
    assert window(500, 3).rate("mizzen_generation_tokens_total") == 30.0


def test_a_window_forgets_what_is_older_than_its_length() -> None:
    assert window(0, 100, 101, 102, length_s=2.0).rate("mizzen_generation_tokens_total") == 10.0


def test_a_single_scrape_has_no_rate_and_no_quantile() -> None:
    once = window(9)
    assert math.isnan(once.rate("mizzen_generation_tokens_total"))
    assert math.isnan(once.quantiles("mizzen_time_to_first_token_seconds", 0.5)[0])


def test_quantiles_are_of_the_window_and_interpolated_in_their_bucket() -> None:
    found = window(1, 2).quantiles("mizzen_time_to_first_token_seconds", 0.25, 0.5, 0.75, 1.0)
    assert found == pytest.approx([0.05, 0.1, 0.15, 0.2])


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    made = Window(10.0)
    for at_s, count in ((1.0, 0), (2.0, 8)):
        made.add(Scrape.parse(f'x_bucket{{le="1.0"}} 0\nx_bucket{{le="+Inf"}} {count}\n', at_s))
    assert made.quantiles("x", 0.9) == [1.0]


def test_a_rate_can_be_of_some_values_of_a_label_alone() -> None:
    made = Window(10.0)
    for at_s in (1.0, 2.0):
        made.add(Scrape.parse(f'x_total{{a="p"}} {at_s}\nx_total{{a="q"}} {5 * at_s}\n', at_s))
    assert made.rate("x_total") == 6.0
    assert made.rate("x_total", "a", "q") == 5.0


# ---- what is seen ----


def test_the_screen_tells_traffic_latency_memory_and_processes() -> None:
    lines = [" ".join(line.split()) for line in shown(window(1, 2)).splitlines()]
    text = "\n".join(lines)
    assert "m http://there" in text
    assert "ready, serve" in text
    assert "requests waiting 5" in text
    assert "waiting for slots 3" in text
    assert "generated tokens 10 /s" in text
    assert "time to first token 100 ms 180 ms 198 ms" in text
    assert "engine-0 ready - 7" in text


def test_a_burst_of_refusals_is_told_by_its_reason_and_how_many_may_run() -> None:
    made = Window(10.0)
    for at_s in (1.0, 2.0):
        made.add(
            Scrape.parse(
                f"mizzen_ready{{{COMMON}}} 1\n"
                f"mizzen_requests_running{{{COMMON}}} 4\n"
                f'mizzen_config_info{{{COMMON},max_running_requests="8"}} 1\n'
                f"mizzen_device_busy_seconds_total{{{COMMON}}} {at_s * 0.5}\n"
                f'mizzen_requests_rejected_total{{{COMMON},reason="rate_limit_exceeded"}} {3 * at_s}\n'
                f'mizzen_requests_rejected_total{{{COMMON},reason="invalid_api_key"}} 9\n',
                at_s,
            )
        )
    text = " ".join(shown(made).split())
    assert "requests running 4 of 8" in text
    assert "device busy 50.0%" in text
    assert "refused by rate_limit_exceeded 3 /s" in text
    assert "invalid_api_key" not in text
    assert "GPUs" not in text


def test_gpus_have_a_panel_where_there_are_any() -> None:
    made = Window(10.0)
    gpu = f'{COMMON},rank="1",gpu="5"'
    made.add(
        Scrape.parse(
            f"mizzen_ready{{{COMMON}}} 1\n"
            f"mizzen_gpu_memory_capacity_bytes{{{gpu}}} {80 * 2**30}\n"
            f"mizzen_gpu_memory_used_bytes{{{gpu}}} {60 * 2**30}\n"
            f"mizzen_gpu_utilization_ratio{{{gpu}}} NaN\n",
            1.0,
        )
    )
    text = " ".join(shown(made).split())
    assert "GPUs" in text
    assert "1 75.0% 80 -" in text


def test_what_is_not_known_is_a_dash_and_a_problem_is_told() -> None:
    assert "-" in shown(window(1))
    assert "does not answer" in shown(window(1, 2), "does not answer")
    assert "waiting for the first answer" in shown(Window(1.0))


# ---- the command ----


class Service:
    """Answers /metrics with ``texts`` in turn, the last again and again."""

    def __init__(self, *texts: str, status: int = 200) -> None:
        left = list(texts)
        self.keys: list[str | None] = []
        keys = self.keys

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                keys.append(self.headers["authorization"])
                self.send_response(status if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write((left.pop(0) if len(left) > 1 else left[0]).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass  # nothing of it is asked for

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def service(*texts: str, status: int = 200) -> Iterator[Service]:
    with contextlib.closing(Service(*texts, status=status)) as running:
        yield running


def test_once_prints_one_interval_and_ends() -> None:
    out = io.StringIO()
    with service(exposition(1), exposition(2)) as there:
        arguments = [there.url + "/v1/", "--once", "--interval", "0.1", "--api-key", "k"]
        assert main(arguments, Console(file=out, width=200)) == 0
        assert there.keys == ["Bearer k", "Bearer k"]
    assert "engine-0" in out.getvalue()


@pytest.mark.parametrize(
    ("text", "status", "problem"),
    [
        ("up 1\n", 200, "no metrics of Mizzen's"),
        ("<html>", 200, "not in Prometheus' format"),
        ("", 401, "answers 401"),
    ],
)
def test_what_is_no_mizzen_is_one_line(text: str, status: int, problem: str) -> None:
    with service(text, status=status) as there, pytest.raises(NoMetrics, match=problem):
        main([there.url, "--once"], Console(file=io.StringIO()))


def test_the_command_ends_with_1_where_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["top", "http://127.0.0.1:9", "--once"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mizzen: http://127.0.0.1:9 does not answer")


def test_ctrl_c_ends_the_watching_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    naps = []

    def sleep(duration_s: float) -> None:
        naps.append(duration_s)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with service(exposition(1), "broken{", exposition(2)) as there:
        assert main([there.url, "--interval", "0.5"], Console(file=io.StringIO())) == 0
    assert naps == [0.5, 0.5, 0.5]
