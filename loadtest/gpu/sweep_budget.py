"""The offline benchmark at several token budgets a step, on one loaded model. Prints a table, writes JSON.

python -m loadtest.gpu.sweep_budget MODEL_FOLDER --budgets 256,288,320,384 [--set NAME=VALUE ...] [--json FILE]
"""

import argparse
import json
from pathlib import Path

from loadtest.offline import environment, measure, parse_setting, sampling, workload
from mizzen import LLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--budgets", default="256,288,320,352,384")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    budgets = [int(part) for part in args.budgets.split(",")]
    llm = LLM(args.model, load_format="dummy", max_batch_tokens=max(budgets), **dict(map(parse_setting, args.set)))
    llm.generate(workload(999, 64)[0], sampling(16), use_tqdm=False)
    rows = []
    for number, budget in enumerate(budgets):
        llm._loop._scheduler._max_batch_tokens = budget
        rows.append({"budget": budget, **measure(llm, number, 256)})
        print(f"budget {budget}: {rows[-1]['output_tokens_per_s']:,.0f} tok/s", flush=True)
    llm.close()
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "settings": args.set, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
