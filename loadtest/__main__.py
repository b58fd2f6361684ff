"""``python -m loadtest``: answers that people believe, from one command against any OpenAI-compatible server."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from loadtest import modes, process, report, terminal
from loadtest.client import Target
from loadtest.run import FORMAT, Options, RunFailed
from loadtest.scenario import Scenario, ScenarioError, load

EXIT_USAGE, EXIT_FAILED = 2, 1
SCENARIOS = Path(__file__).parent / "scenarios"
_FIELDS = ("requests", "duration_s", "warmup_s", "endpoint", "seed")
# A flag that only one kind of load or workload has also chooses that kind.
_KINDS = {
    "load.rate": ("load", "open"), "load.concurrency": ("load", "closed"), "load.speed": ("load", "replay"),
    "workload.path": ("workload", "trace"),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 1 if the server failed, 2 for what cannot be run."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ScenarioError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return EXIT_USAGE
    except RunFailed as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(args: argparse.Namespace) -> int:
    return _finish(args, modes.repeated(_scenario(args), _options(args), args.repetitions))


def _sweep(args: argparse.Namespace) -> int:
    rates, concurrencies = _numbers("--rates", args.rates), _numbers("--concurrencies", args.concurrencies)
    work = modes.sweep(
        _scenario(args), _options(args), rates=rates, concurrencies=[round(one) for one in concurrencies]
    )
    return _finish(args, work)


def _search(args: argparse.Namespace) -> int:
    return _finish(args, modes.search(
        _scenario(args), _options(args), start_rate=args.start_rate, percentile=args.percentile,
        precision=args.precision, most_runs=args.most_runs,
    ))  # fmt: skip


def _compare(args: argparse.Namespace) -> int:
    options = _options(args)
    side_a = modes.Side(args.name_a, options, args.command_a)
    try:
        target = dataclasses.replace(options.target, base_url=args.base_url_b or options.target.base_url)
    except ValueError as error:
        raise ScenarioError(f"--base-url-b: {error}") from None
    side_b = modes.Side(args.name_b, dataclasses.replace(options, target=target), args.command_b)
    if target == options.target and not (args.command_a and args.command_b):
        raise ScenarioError("compare needs --base-url-b, or --command-a and --command-b to start two servers in turns")
    return _finish(args, modes.compare(_scenario(args), side_a, side_b, args.pairs))


def _soak(args: argparse.Namespace) -> int:
    return _finish(args, modes.soak(_scenario(args), _options(args), args.tolerance))


def _report(args: argparse.Namespace) -> int:
    try:
        result = json.loads(args.result.read_text())
        written = report.render(result)
    except (OSError, ValueError, KeyError) as error:
        raise ScenarioError(f"{args.result}: not a result of this program: {error!r}") from None
    (args.output or args.result.with_suffix(".html")).write_text(written)
    return 0


def _finish(args: argparse.Namespace, work: Coroutine[Any, Any, dict[str, Any]]) -> int:
    """Runs, shows and writes; 1 if nothing was answered, or a soak was not steady."""
    result = {"format": FORMAT, **process.start(work)}
    print(terminal.table(result))
    if args.json == Path("-"):  # where no file outlives the run: a Job's log
        print(json.dumps(result))
    elif args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.html:
        args.html.write_text(report.render(result))
    answered = all(one["summary"]["complete"] for one in result["runs"])
    return 0 if answered and result.get("steady", True) else EXIT_FAILED


def _numbers(flag: str, text: str | None) -> list[float]:
    """ "1,2,4", or "1:64:7": seven from 1 to 64, each the same factor above the one before."""
    try:
        if text and ":" in text:
            first, last, count = text.split(":")
            return np.geomspace(float(first), float(last), int(count)).tolist()  # type: ignore[no-any-return]
        return [float(one) for one in text.split(",")] if text else []
    except ValueError:
        raise ScenarioError(f"{flag} {text}: neither 1,2,4 nor FIRST:LAST:COUNT") from None


def _scenario(args: argparse.Namespace) -> Scenario:
    given = {name: value for name, value in vars(args).items() if value is not None}
    kinds = [f"{part}.kind={json.dumps(kind)}" for name, (part, kind) in _KINDS.items() if name in given]
    changes = [f"{name}={json.dumps(value)}" for name, value in given.items() if "." in name or name in _FIELDS]
    return load(_scenario_path(args.scenario), [*kinds, *changes, *args.set])


def _scenario_path(named: str | None) -> Path | None:
    """A file, or the name of one of ours."""
    if named is None:
        return None
    ours = SCENARIOS / f"{named}.yaml"
    return ours if ours.exists() and not Path(named).exists() else Path(named)


def _options(args: argparse.Namespace) -> Options:
    try:
        headers = tuple((name.strip(), value.strip()) for name, _, value in (h.partition(":") for h in args.header))
        target = Target(args.base_url, args.api_key or os.environ.get("OPENAI_API_KEY"), headers, not args.insecure)
    except ValueError as error:
        raise ScenarioError(f"--base-url: {error}") from None
    return Options(
        target, args.model, args.tokenizer, args.metrics_url, args.sample_s, args.wait_s, process.watch, args.records
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, does: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        added.set_defaults(run=does)
        return added

    one = command("run", _run, "one load and its figures")
    one.add_argument("--repetitions", type=int, default=1, help="each with another seed; gives 95%% intervals")
    many = command("sweep", _sweep, "a run at each load: the throughput-latency curve and its knee")
    many.add_argument("--rates", metavar="LIST", help="1,2,4 or FIRST:LAST:COUNT, requests a second")
    many.add_argument("--concurrencies", metavar="LIST", help="likewise, users")
    find = command("search", _search, "the highest rate that keeps the scenario's SLO")
    find.add_argument("--percentile", choices=["p50", "p90", "p95", "p99", "max"], default="p90")
    find.add_argument("--start-rate", type=float, default=1.0)
    find.add_argument("--precision", type=float, default=0.05, help="how close the answer is to be")
    find.add_argument("--most-runs", type=int, default=16)
    two = command("compare", _compare, "two servers, or two commits, in turns: the ratio of their figures")
    two.add_argument("--base-url-b", help="the second server")
    for side in "ab":
        two.add_argument(f"--name-{side}", default=side)
        two.add_argument(f"--command-{side}", metavar="COMMAND", help="starts this side's server for each of its turns")
    two.add_argument("--pairs", type=int, default=5)
    long = command("soak", _soak, "one long run: is its end like its beginning?")
    long.add_argument("--tolerance", type=float, default=0.1, help="exit code 1 if a figure drifts by more")
    for added in (one, many, find, two, long):
        _add_common(added)
    drawn = command("report", _report, "draw the HTML report of a result again")
    drawn.add_argument("result", type=Path, metavar="RESULT.json")
    drawn.add_argument("-o", "--output", type=Path)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    whom = parser.add_argument_group("whom to ask")
    whom.add_argument("--base-url", required=True, help="such as http://127.0.0.1:8000/v1")
    whom.add_argument("--model", help="default: the first that the server lists")
    whom.add_argument("--api-key", help="default: OPENAI_API_KEY")
    whom.add_argument("--header", action="append", default=[], metavar="NAME:VALUE")
    whom.add_argument("--wait", type=float, default=0.0, dest="wait_s", metavar="S", help="for a server that starts")
    whom.add_argument("--insecure", action="store_true", help="any TLS certificate will do")
    what = parser.add_argument_group("what to ask", "a scenario's fields; --set changes any of them")
    what.add_argument("--scenario", metavar="FILE", help=f"YAML, or one of ours: {', '.join(_ours())}")
    what.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="such as load.rate=8")
    what.add_argument("--endpoint", choices=["chat", "completions"])
    what.add_argument("--rate", type=float, dest="load.rate", help="an open loop's requests a second")
    what.add_argument("--concurrency", type=int, dest="load.concurrency", help="a closed loop's users")
    what.add_argument("--speed", type=float, dest="load.speed", help="of a replayed trace")
    what.add_argument("--requests", type=int)
    what.add_argument("--duration", type=float, dest="duration_s", metavar="S")
    what.add_argument("--warmup", type=float, dest="warmup_s", metavar="S")
    what.add_argument("--input-tokens", type=int, dest="workload.input_tokens")
    what.add_argument("--output-tokens", type=int, dest="workload.output_tokens")
    what.add_argument("--trace", dest="workload.path", metavar="FILE")
    what.add_argument("--trace-format", dest="workload.format", choices=["azure", "mooncake", "bailian"])
    what.add_argument("--seed", type=int)
    how = parser.add_argument_group("how")
    how.add_argument("--tokenizer", type=Path, help="the model's tokenizer.json, or its folder")
    how.add_argument("--metrics-url", help="default: /metrics of the same server; '' for none")
    how.add_argument("--sample-s", type=float, default=1.0, help="between samples of it")
    how.add_argument(
        "--json", type=Path, help="the result and all that it takes to run it again; -: as the last line of output"
    )
    how.add_argument("--html", type=Path, help="a report to hand round")
    how.add_argument("--records", type=Path, help="every request and arrival, one JSON object a line")


def _ours() -> list[str]:
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml"))


if __name__ == "__main__":
    sys.exit(main())
