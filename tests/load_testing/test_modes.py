"""What several runs tell together, and the command line from end to end."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from delay_server import DelayServer, Script

from loadtest import __main__ as cli
from loadtest import modes, report
from loadtest.client import Target
from loadtest.measures import interval
from loadtest.run import Options
from loadtest.scenario import Scenario, ScenarioError, convert


def result(tokens: float, e2e_s: float, *, offered: float = 10.0, done: float = 10.0, **more: Any) -> dict[str, Any]:
    one = {
        "requests": 100, "errors": {}, "offered_requests_per_s": offered, "requests_per_s_under_load": done,
        "output_tokens_per_s_under_load": tokens, "output_tokens_per_s": tokens, "requests_per_s": done,
        "ttft_s": {"p90": 0.1}, "tbt_s": {"p90": 0.01}, "tpot_s": {}, "e2e_s": {"mean": e2e_s}, **more,
    }  # fmt: skip
    return {"summary": one}


def scenario(**fields: Any) -> Scenario:
    return convert({"workload": {"input_tokens": 16, "output_tokens": 5}, "duration_s": 1.0, **fields})


def test_the_knee_has_the_most_throughput_for_its_latency() -> None:
    assert modes.knee([result(100, 1.0), result(190, 1.1), result(210, 2.0), result(212, 9.0)]) == 1
    assert modes.knee([]) is None


def test_a_run_whose_answers_were_cut_off_is_no_knee() -> None:
    cut = result(300, 1.0, errors={"unfinished": 1})
    assert modes.knee([result(100, 1.0), cut]) == 0
    assert modes.knee([cut]) is None


def test_a_server_is_saturated_where_it_answers_less_than_is_offered() -> None:
    runs = [result(1, 1, offered=10, done=9.8), result(1, 1, offered=20, done=17.9), result(1, 1, offered=40, done=18)]
    assert modes.saturated_from(runs) == 1
    assert modes.saturated_from(runs[:1]) is None


def test_a_run_misses_its_slo_by_latency_by_failures_or_by_falling_behind() -> None:
    slo = scenario(slo={"ttft_ms": 150, "tbt_ms": 20}).slo
    assert modes.misses(result(1, 1), slo, "p90") == []
    assert modes.misses(result(1, 1, ttft_s={"p90": 0.2}), slo, "p90") == ["TTFT P90 200.0 ms > 150 ms"]
    assert modes.misses(result(1, 1, tbt_s={"p90": 0.021}), slo, "p90") == ["TBT P90 21.0 ms > 20 ms"]
    assert modes.misses(result(1, 1, errors={"cut": 2}), slo, "p90") == ["2 of 100 failed"]
    assert modes.misses(result(1, 1, done=5.0), slo, "p90") == ["5.00 of 10.00 requests/s answered"]


@pytest.mark.parametrize("start", [1.0, 20.0, 500.0])
def test_bisection_ends_close_to_the_highest_that_holds(start: float) -> None:
    asked: list[float] = []

    async def holds(value: float) -> bool:
        asked.append(value)
        return value <= 37.0

    low, high = asyncio.run(modes.bisect(holds, start, 0.05, 30, lambda: False))
    assert low is not None
    assert high is not None
    assert 37 / 1.05 <= low <= 37 < high <= low * 1.05
    assert len(asked) < 15
    assert asyncio.run(modes.bisect(holds, 100.0, 0.05, 2, lambda: False)) == (None, 50.0)


def test_an_interval_widens_with_what_varies_and_narrows_with_repetition() -> None:
    assert interval([3.0]) == {"mean": 3.0}
    assert interval([1.0, 3.0]) == pytest.approx({"mean": 2.0, "low": 2 - 12.706, "high": 2 + 12.706}, rel=1e-3)
    many = interval([1.0, 3.0] * 50)
    assert many["high"] - many["low"] == pytest.approx(2 * 1.984 * 1.005 / 10, rel=0.01)


def test_a_ratio_tells_two_apart_only_where_its_interval_does() -> None:
    slow = [result(100 + k, 1.0 + 0.01 * k) for k in range(4)]
    fast = [result(120 + k, 1.0 - 0.01 * k) for k in range(4)]
    found = modes.ratios(slow, fast)
    assert found["output tokens/s"]["b_is"] == "better"
    assert found["output tokens/s"]["mean"] == pytest.approx(1.2, abs=0.01)
    assert found["E2E mean"]["b_is"] == "not told apart"
    assert modes.ratios(fast, slow)["output tokens/s"]["b_is"] == "worse"
    assert modes.ratios(slow[:1], fast[:1])["output tokens/s"]["b_is"] == "not told apart"
    assert "TPOT P50" not in found


def test_a_drift_is_the_last_third_over_the_first() -> None:
    rows = [
        {"output_tokens_per_s": 100.0 - place, "ttft_s": {"p50": 0.1 + 0.01 * place}, "tbt_s": {}} for place in range(9)
    ]
    assert modes.drifts(rows) == pytest.approx({"output tokens/s": 93 / 99, "TTFT P50": 0.17 / 0.11})


def one_at_a_time(_body: dict[str, Any], _number: int) -> Script:
    return Script((0.02, 0.001), queue=True)


def test_a_search_finds_what_a_server_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "PAUSE_S", 0.0)
    server = DelayServer(one_at_a_time)  # about 45 a second

    async def both() -> dict[str, Any]:
        async with server.running():
            options = Options(Target(server.url), metrics_url="")
            spec = scenario(load={"kind": "open", "rate": 1, "gaps": "constant"}, slo={"ttft_ms": 150})
            return await modes.search(spec, options, start_rate=15, percentile="p90", precision=0.5, most_runs=6)

    found = asyncio.run(both())
    assert found["highest_rate"] is not None
    assert 3 < found["highest_rate"] < 80
    assert found["lowest_missed_rate"] > found["highest_rate"]
    kept = [not why for why in found["misses"]]
    rates = [one["scenario"]["load"]["rate"] for one in found["runs"]]
    assert all(rate <= found["highest_rate"] for rate, keeps in zip(rates, kept, strict=True) if keeps)


def test_compared_servers_take_turns_with_the_same_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "PAUSE_S", 0.0)
    slow, fast = (DelayServer(lambda _b, _n, gap=gap: Script((gap,) * 5)) for gap in (0.03, 0.01))  # type: ignore[misc]
    spec = scenario(load={"kind": "closed", "concurrency": 4}, requests=8)

    async def both() -> dict[str, Any]:
        async with slow.running(), fast.running():
            a, b = (modes.Side(name, Options(Target(server.url), metrics_url=""))
                    for name, server in (("old", slow), ("new", fast)))  # fmt: skip
            return await modes.compare(spec, a, b, 3)

    found = asyncio.run(both())
    assert found["ratios"]["TBT P50"]["b_is"] == "better"
    assert found["ratios"]["TBT P50"]["high"] < 0.8
    prompts = [[handled.prompt for handled in server.handled] for server in (slow, fast)]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == 24
    began = [one["began"] for one in found["runs"]]
    assert began[0] <= began[3] <= began[4] <= began[1] <= began[2] <= began[5]  # a b, b a, a b
    drawn = figures_of(report.render({"format": 1, **found}))[0]
    assert drawn.findtext("figcaption") == "new over old: green is better, red worse, grey not told apart"
    assert len(list(drawn.iter("circle"))) == len(found["ratios"])


def test_a_side_with_a_command_has_its_server_only_for_its_turn(tmp_path: Path) -> None:
    options = Options(Target("http://127.0.0.1:1"))
    log = tmp_path / "log"
    program = f'trap "echo over >> {log}; exit" TERM; echo on >> {log}; while :; do sleep 0.05; done'
    side = modes.Side("a", options, f"sh -c '{program}'")

    async def turn() -> None:
        async with modes.started(side):
            while not log.exists():
                await asyncio.sleep(0.02)

    asyncio.run(turn())
    assert log.read_text().split() == ["on", "over"]


def test_what_cannot_be_searched_or_swept_is_refused() -> None:
    options = Options(Target("http://127.0.0.1:1"))
    with pytest.raises(ScenarioError, match=r"slo\.ttft_ms"):
        asyncio.run(modes.search(scenario(), options, start_rate=1, percentile="p90", precision=0.1, most_runs=1))
    with pytest.raises(ScenarioError, match="--rates"):
        asyncio.run(modes.sweep(scenario(), options))


# ---- the command line ----

METRICS = """# HELP mizzen_requests_running x
mizzen_requests_running{model_name="m",engine="0"} 3
mizzen_requests_waiting{model_name="m",reason="slots"} 1
mizzen_requests_waiting{model_name="m",reason="kv_pages"} 4
mizzen_kv_cache_usage_ratio{model_name="m"} 0.25
vllm:kv_cache_usage_perc{model_name="m"} 0.99
mizzen_generation_tokens_total{model_name="m"} %d
mizzen_build_info{version="1.2.3",python="3"} 1
"""


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server in a thread: the command line has an event loop of its own."""
    scrapes = iter(range(0, 10**6, 100))
    server = DelayServer(lambda _body, _number: Script((0.01, 0.005, 0.005), cached_tokens=4),
                         lambda: METRICS % next(scrapes))  # fmt: skip
    ready, over, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        async with server.running():
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait(10)
    yield server.url
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [name for name, _ in attrs if name in ("src", "href", "xlink:href", "srcset")]


def figures_of(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring("<figure>" + part.split("</figure>")[0] + "</figure>")
            for part in page.split("<figure>")[1:]]  # fmt: skip


def test_neither_torch_nor_the_server_nor_yaml_is_needed(url: str) -> None:
    program = f"""
import sys
for name in ("torch", "mizzen", "yaml", "tokenizers", "uvloop", "httpx"):
    sys.modules[name] = None
from loadtest.__main__ import main
sys.exit(main(["run", "--base-url", "{url}", "--rate", "50", "--requests", "5", "--output-tokens", "3"]))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "5 of 5 complete" in done.stdout


def test_a_run_prints_its_table_and_writes_its_result_and_its_report(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rate", "40", "--requests", "40", "--input-tokens", "20", "--output-tokens", "3", "--sample-s", "0.2"]
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    assert cli.main(["run", "--base-url", url, "--api-key", "hidden", *words, *files]) == 0
    printed = capsys.readouterr().out
    assert "40 of 40 complete" in printed
    assert "time to first token" in printed
    written = json.loads((tmp_path / "a.json").read_text())
    assert "hidden" not in json.dumps(written)
    (one,) = written["runs"]
    assert one["scenario"]["load"] == {
        "kind": "open", "rate": 40.0, "gaps": "poisson", "burstiness": 1.0, "end_rate": None,
    }  # fmt: skip
    assert one["summary"]["tokens"]["cached"] == 160
    server = one["server"]
    assert server["information"]["version"] == "1.2.3"
    assert set(server["timeline"]["running"]) == {3}
    assert set(server["timeline"]["waiting"]) == {5}
    assert set(server["timeline"]["kv_usage"]) == {0.25}  # ours, before the alias
    assert server["increase"]["generation_tokens"] == 100 * (server["samples"] - 1)
    assert sum(one["timeline"]["due"]) == 40
    assert sum(one["histograms"]["ttft_s"]["counts"]) == 40
    page = (tmp_path / "a.html").read_text()
    assert "Client: send lag P99" in page
    parsed = Page()
    parsed.feed(page)
    assert parsed.outside == []
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    titles = [figure.findtext("figcaption") for figure in figures_of(page)]
    assert "Server: KV cache in use" in titles
    assert "Time to first token: distribution" in titles
    for figure in figures_of(page):
        axes = [text.text for text in figure.iter("text") if text.get("class") == "title"]
        assert len(axes) == 2, figure.findtext("figcaption")
        assert all(axes)
    assert cli.main(["report", str(tmp_path / "a.json"), "-o", str(tmp_path / "b.html")]) == 0
    assert (tmp_path / "b.html").read_text() == page


def test_a_sweep_draws_its_curve(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes, "PAUSE_S", 0.0)
    words = ["--concurrencies", "1,2,4", "--requests", "12", "--input-tokens", "20", "--output-tokens", "3"]
    assert cli.main(["sweep", "--base-url", url, *words, "--html", str(tmp_path / "a.html")]) == 0
    printed = capsys.readouterr().out
    assert [f"{count} users" in printed for count in (1, 2, 4)] == [True] * 3
    assert "< knee" in printed
    curve = figures_of((tmp_path / "a.html").read_text())[0]
    assert curve.findtext("figcaption") == "Time to first token against throughput"
    assert len(list(curve.iter("circle"))) == 9  # three percentiles of three loads


def test_a_soak_says_whether_it_was_steady(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rate", "60", "--duration", "1", "--input-tokens", "20", "--output-tokens", "3", "--tolerance"]
    assert cli.main(["soak", "--base-url", url, *words, "1000"]) == 0
    assert "steady: the last third over the first" in capsys.readouterr().out
    assert cli.main(["soak", "--base-url", url, *words, "0"]) == 1
    assert "NOT STEADY" in capsys.readouterr().out


def test_what_is_wrong_is_one_line_and_an_exit_code(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, message in (
        (["run", "--base-url", "127.0.0.1", "--requests", "1"], 2, "is no http:// or https:// address"),
        (["run", "--base-url", url], 2, "say how long"),
        (["run", "--base-url", "http://127.0.0.1:9", "--requests", "1"], 1, "--model does without it"),
        (["compare", "--base-url", url, "--requests", "1"], 2, "--base-url-b"),
        (["run", "--base-url", url, "--requests", "1", "--scenario", "/no/such.yaml"], 2, "No such file"),
    ):
        assert cli.main(words) == code
        said = capsys.readouterr().err
        assert message in said
        assert len(said.splitlines()) == 1
