"""Where the offline benchmark's time goes, by kind and size of step: wall time between results, as the loop sees them.

    python -m loadtest.gpu.step_times MODEL_FOLDER [--set NAME=VALUE ...] [--timeline 24] [--json FILE]

``--timeline N`` adds the same in the order of time: N groups of as many steps each.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.offline import environment, parse_setting, sampling, workload
from mizzen import LLM


class Step(NamedTuple):
    rows: int
    decode_rows: int
    tokens: int
    seconds: float  # since the result before
    waiting_s: float  # of them, for the device

    @property
    def kind(self) -> str:
        if self.decode_rows == self.rows:
            return f"decode {(self.rows + 31) // 32 * 32:4}"
        return f"mixed {'<=512' if self.tokens <= 512 else '<=2048' if self.tokens <= 2048 else '> 2048'}"


def by_kind(steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    groups: defaultdict[str, list[Step]] = defaultdict(list)
    for step in steps:
        groups[step.kind].append(step)
    return {kind: means(groups[kind]) for kind in sorted(groups)}


def timeline(steps: Sequence[Step], groups: int) -> list[dict[str, float]]:
    """The last group may have fewer steps, or follow as one more."""
    size = max(1, len(steps) // groups)
    return [{"first": first, **means(steps[first : first + size])} for first in range(0, len(steps), size)]


def means(steps: Sequence[Step]) -> dict[str, float]:
    rows, decode_rows, tokens, seconds, waiting_s = map(sum, zip(*steps, strict=True))
    count = len(steps)
    return {
        "steps": count,
        "rows": round(rows / count, 1),
        "decode_rows": round(decode_rows / count, 1),
        "tokens": round(tokens / count, 1),
        "ms": round(seconds / count * 1e3, 2),
        "waiting": round(waiting_s / seconds, 2),
    }


def record(llm: LLM, steps: list[Step]) -> None:
    """From now on, each result of the engine's loop adds its step."""
    loop = llm._loop
    take = loop._take_result
    last = time.perf_counter()

    def timed() -> Any:
        nonlocal last
        output = loop._in_flight[0][0]
        begin = time.perf_counter()
        result = take()
        now = time.perf_counter()
        steps.append(Step(output.num_rows, output.num_decode_rows, output.num_tokens, now - last, now - begin))
        last = now
        return result

    loop._take_result = timed  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--timeline", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = dict(map(parse_setting, args.set))
    llm = LLM(args.model, load_format="dummy", **settings)
    prompts, outputs = workload(0, args.requests)
    llm.generate(workload(999, 64)[0], sampling(16), use_tqdm=False)
    steps: list[Step] = []
    record(llm, steps)
    begin = time.perf_counter()
    llm.generate(prompts, [sampling(count) for count in outputs], use_tqdm=False)
    total = time.perf_counter() - begin
    llm.close()
    result: dict[str, Any] = {
        "environment": environment(),
        "model": Path(args.model).name,
        "settings": settings,
        "seconds": round(total, 3),
        "output_tokens_per_s": round(sum(outputs) / total, 1),
        "kinds": by_kind(steps),
    }
    print(f"{sum(outputs) / total:,.0f} tok/s in {total:.2f} s; steps: {len(steps)}")
    for kind, mean in result["kinds"].items():
        whole_s = mean["steps"] * mean["ms"] / 1e3
        print(f"  {kind:14} {mean['steps']:5} steps {whole_s:7.3f} s,", end=" ")
        print(f"{mean['ms']:7.2f} ms each, waiting {mean['waiting']:.0%}")
    if args.timeline:
        result["timeline"] = timeline(steps, args.timeline)
        for mean in result["timeline"]:
            print(
                f"  from {mean['first']:5}: rows {mean['rows']:6.1f} decode {mean['decode_rows']:6.1f}"
                f" tokens {mean['tokens']:7.1f} ms {mean['ms']:7.2f} waiting {mean['waiting']:.0%}"
            )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
