"""Where the offline benchmark's time goes, by kind and size of step: wall time between results, as the loop sees them.

python -m loadtest.gpu.step_times MODEL_FOLDER [--set NAME=VALUE ...]
"""

import argparse
import time
from collections import defaultdict
from typing import Any

from loadtest.offline import parse_setting, sampling, workload
from mizzen import LLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--requests", type=int, default=256)
    args = parser.parse_args()
    llm = LLM(args.model, load_format="dummy", **dict(map(parse_setting, args.set)))
    prompts, outputs = workload(0, args.requests)
    llm.generate(workload(999, 64)[0], sampling(16), use_tqdm=False)
    loop = llm._loop
    take = loop._take_result
    last = [time.perf_counter()]
    spent: defaultdict[str, list[float]] = defaultdict(list)
    waits: defaultdict[str, float] = defaultdict(float)

    def timed() -> Any:
        output = loop._in_flight[0][0]
        begin = time.perf_counter()
        result = take()
        now = time.perf_counter()
        decode = output.num_decode_rows
        if decode == output.num_rows:
            kind = f"decode {(decode + 31) // 32 * 32:4}"
        else:
            tokens = output.num_tokens
            kind = f"mixed {'<=512' if tokens <= 512 else '<=2048' if tokens <= 2048 else '> 2048'}"
        spent[kind].append(now - last[0])
        waits[kind] += now - begin
        last[0] = now
        return result

    loop._take_result = timed  # type: ignore[method-assign]
    last[0] = begin = time.perf_counter()
    llm.generate(prompts, [sampling(count) for count in outputs], use_tqdm=False)
    total = time.perf_counter() - begin
    llm.close()
    print(f"{sum(outputs) / total:,.0f} tok/s in {total:.2f} s; steps: {sum(map(len, spent.values()))}")
    for kind in sorted(spent):
        times = spent[kind]
        share = waits[kind] / sum(times)
        print(
            f"  {kind:14} {len(times):5} steps {sum(times):7.3f} s,"
            f" {sum(times) / len(times) * 1e3:7.2f} ms each, waiting {share:.0%}"
        )


if __name__ == "__main__":
    main()
