"""A first look on a GPU: do graphs and eager steps, and overlap on and off, give the same tokens on dummy weights?

python -m loadtest.gpu.smoke MODEL_FOLDER
"""

import random
import sys
import time

from mizzen import LLM, SamplingParams


def answers(model: str, **settings: object) -> list[list[int]]:
    start = time.perf_counter()
    llm = LLM(model, load_format="dummy", max_model_len=4096, **settings)
    ready = time.perf_counter()
    source = random.Random(0)
    prompts = [[source.randint(0, 10_000) for _ in range(source.randint(10, 700))] for _ in range(24)]
    sampling = [
        SamplingParams(temperature=0.0 if k % 2 else 0.8, seed=k, max_tokens=64, ignore_eos=True) for k in range(24)
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    print(f"{settings}: start {ready - start:.1f} s, answers {time.perf_counter() - ready:.1f} s", flush=True)
    llm.close()
    return [output.choices[0].token_ids for output in outputs]


def compare(name: str, one: list[list[int]], other: list[list[int]]) -> None:
    first = [
        next((k for k, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), None)
        for x, y in zip(one, other, strict=True)
    ]
    same = sum(place is None for place in first)
    print(
        f"{name}: {same} of {len(first)} answers equal; first differences at {[k for k in first if k is not None]}",
        flush=True,
    )


def main() -> None:
    model = sys.argv[1]
    eager = answers(model, cuda_graph_rows=0)
    compare("eager twice", eager, answers(model, cuda_graph_rows=0))
    compare("graphs", eager, answers(model))
    compare("graphs, no overlap", eager, answers(model, overlap_depth=0))
    compare(
        "torch kernels",
        eager,
        answers(model, cuda_graph_rows=0, kernels_off="rms_norm,add_rms_norm,qk_norm_rope_write_kv,silu_mul"),
    )


if __name__ == "__main__":
    main()
