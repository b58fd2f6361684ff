"""The kernels that an image brings: compiled without a GPU, for a GPU's architecture, and all that a start asks for."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from containers.docker_host import REPOSITORY

TOOL = REPOSITORY / "docker/compile_triton.py"
TIMEOUT_S = 300  # minutes of one core, where others have it too
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 5000,
    "max_position_embeddings": 128,
}
# Few sizes of graphs, so that there are few kernels.
SETTINGS = {"MIZZEN_MAX_RUNNING_REQUESTS": "2", "MIZZEN_MAX_BATCH_TOKENS": "32"}


@pytest.fixture(scope="module")
def triton() -> Path:
    """A folder with the GPU image's Triton. Its wheel has the compiler and the assembler, and needs no GPU."""
    pinned = re.search(r"^triton==\S+$", (REPOSITORY / "docker/constraints-cuda.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    folder = REPOSITORY / "build" / pinned[0]
    if not (folder / "triton").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, pinned[0]]
        subprocess.run(pip, check=True, timeout=600)
    return folder


def run(triton: Path, model: Path, output: Path, *options: str) -> tuple[int, str]:
    """Its exit code and what it printed."""
    paths = os.pathsep.join([str(REPOSITORY / "app"), str(triton)])
    command = [sys.executable, TOOL, "--output", output, "--models", f"{model}:2", "--processes", "2", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MIZZEN_", "TRITON_"))}
    with subprocess.Popen(
        command,
        env=environment | SETTINGS | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            if process.poll() is None:  # its processes do not end with it
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_start_finds_all_kernels_that_were_compiled_without_a_gpu(triton: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    code, printed = run(triton, model, tmp_path / "made/kernels", "--architectures", "9.0a")
    assert code == 0, printed
    files = [file for file in (tmp_path / "made").rglob("*.json") if not file.name.startswith("__grp__")]
    described = [json.loads(file.read_text()) for file in files]
    names = {one["name"] for one in described}
    assert {"_norm_kernel", "_decode_kernel", "_prefill_kernel", "_draw_kernel", "_shard_top_k_kernel"} <= names
    assert {one["target"]["arch"] for one in described} == {90}
    assert len(list((tmp_path / "made").rglob("*.cubin"))) == len(described)

    # In another place, as in an image: nothing is compiled, and nothing is written.
    shutil.move(tmp_path / "made", tmp_path / "moved")
    cache = tmp_path / "moved/kernels"
    before = sorted(cache.rglob("*"))
    code, printed = run(triton, model, cache, "--check")
    assert (code, printed.rpartition(", ")[2]) == (0, "0 not found\n"), printed
    assert sorted(path for path in cache.rglob("*") if "__pycache__" not in path.parts) == before

    lost = next(cache.glob("*/_norm_kernel.json"))
    shutil.rmtree(lost.parent)
    code, printed = run(triton, model, cache, "--check")
    assert code == 1
    assert f"{lost.stem} " in printed
