"""What holds for the repository as a whole: sizes, imports, and documents that must equal the code."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENGINE_PACKAGES = [
    "engine",
    "model_runner",
    "models",
    "layers",
    "attention",
    "kernels",
    "platform",
    "distributed",
    "scheduler",
    "kv_cache",
]


def python_files() -> list[Path]:
    return sorted(path for folder in ("app", "tests", "loadtest", "docker") for path in (ROOT / folder).rglob("*.py"))


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_file_is_over_500_lines() -> None:
    assert len(python_files()) > 50
    assert {str(path.relative_to(ROOT)): lines(path) for path in python_files() if lines(path) > 500} == {}


def test_the_engine_is_under_8000_lines() -> None:
    files = [path for name in ENGINE_PACKAGES for path in (ROOT / "app/mizzen" / name).rglob("*.py")]
    assert 1000 < sum(map(lines, files)) < 8000


@pytest.mark.parametrize(
    "module",
    [
        "mizzen",
        "mizzen.cli",
        "mizzen.config.resolve",
        "mizzen.ipc.process",
        "mizzen.kv_cache.cache",
        "mizzen.observability.logs",
        "mizzen.observability.metrics_worker",
        "mizzen.scheduler.scheduler",
        "mizzen.server.main",
        "mizzen.supervisor.main",
        "mizzen.tokenizer.detokenize_worker",
        "mizzen.tokenizer.tokenize_worker",
        "mizzen.top",
    ],
)
def test_torch_is_not_loaded_by(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_readme_lists_every_setting_as_the_code_does() -> None:
    from mizzen.config.reference import embedded, render

    table = embedded((ROOT / "README.md").read_text())
    assert table == render(), "run: python -m mizzen.config.reference, and paste it into README.md"
