"""Compiles FlashInfer's modules that Mizzen asks for into the package, where FlashInfer looks before it compiles.

No GPU is needed: FLASHINFER_CUDA_ARCH_LIST names the architectures. What is not here is compiled at its first use,
into FLASHINFER_WORKSPACE_BASE, which takes nvcc: an image has none, and says so then.
"""

import shutil

import torch
from flashinfer.compilation_context import CompilationContext
from flashinfer.jit import build_jit_specs, env
from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module
from flashinfer.jit.core import JitSpec

HEAD_DIMS = (64, 128)
DTYPE = torch.bfloat16  # what checkpoints for GPUs are in
HOPPER = (9, "0a")


def specs(architectures: set[tuple[int, str]]) -> list[JitSpec]:
    """Prefill (FA2, and FA3 for Hopper) and decode; decode with tensor cores is FA2's prefill."""
    made = []
    for head_dim in HEAD_DIMS:
        types = (DTYPE, DTYPE, DTYPE, torch.int32)
        made.append(gen_batch_decode_module(*types, head_dim, head_dim, 0, False, False))
        backends = ["fa2", "fa3"] if HOPPER in architectures else ["fa2"]
        made += [
            gen_batch_prefill_module(backend, *types, head_dim, head_dim, 0, False, False, False)
            for backend in backends
        ]
    return made


def main() -> None:
    wanted = specs(set(CompilationContext().TARGET_CUDA_ARCHS))
    build_jit_specs(wanted, verbose=False)
    for spec in wanted:
        destination = env.FLASHINFER_AOT_DIR / spec.name / f"{spec.name}.so"
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, destination)
        print(destination.name, destination.stat().st_size)


if __name__ == "__main__":
    main()
