"""What holds for the repository as a whole: sizes, imports, and documents that must equal the code."""

import ast
import subprocess
import sys
import tokenize
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


def lines_of_code(path: Path) -> int:
    """Without docstrings, comments and blank lines: to explain more must not cost anything."""
    documented = {
        line
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with path.open() as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in blank]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documented)


def test_the_engine_is_under_8000_lines_of_code() -> None:
    files = [path for name in ENGINE_PACKAGES for path in (ROOT / "app/mizzen" / name).rglob("*.py")]
    assert 1000 < sum(map(lines_of_code, files)) < 8000


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
        "mizzen.doctor.main",
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
