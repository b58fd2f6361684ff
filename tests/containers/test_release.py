"""A release: one version everywhere, and a workflow that publishes nothing which can be moved or was not checked."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from containers.docker_host import REPOSITORY
from containers.test_build_files import load

WORKFLOW = REPOSITORY / ".github/workflows/release.yml"
RELEASE = load("release")


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return found


def test_every_file_says_the_same_version() -> None:
    assert RELEASE.check(REPOSITORY, None) == ([], "")
    said = RELEASE.versions(REPOSITORY)
    assert {file for file, _ in said} == set(RELEASE.PLACES)
    assert len([file for file, _ in said if file.endswith("Chart.yaml")]) == 2, "the chart's own and the application's"


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A copy of the files that say a version, and a changelog with version 0.1.0."""
    for file in RELEASE.PLACES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        text = (REPOSITORY / file).read_text()
        (tmp_path / file).write_text(text.replace(RELEASE.versions(REPOSITORY)[0][1], "0.1.0"))
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changes\n\n## Unreleased\n\nA\n\n## 0.1.0 (a day)\n\nB\n\n## 0.0.9\n\nC\n"
    )
    return tmp_path


def test_a_tag_needs_its_version_in_every_file_and_notes(released: Path) -> None:
    assert RELEASE.check(released, "v0.1.0") == ([], "B")
    wrong, _ = RELEASE.check(released, "v0.2.0-rc1")
    assert "CHANGELOG.md has no section 0.2.0-rc1" in wrong
    assert {line.split()[0] for line in wrong} == {*RELEASE.PLACES, "CHANGELOG.md"}
    assert "0.1.0 is no tag of a release: v0.1.0 is one, and v0.1.0-rc1" in RELEASE.check(released, "0.1.0")[0]


@pytest.mark.parametrize("file", sorted(RELEASE.PLACES))
def test_a_file_that_says_another_version_or_none_is_named(released: Path, file: str) -> None:
    text = (released / file).read_text()
    for other, said in (("0.1.1", "0.1.1"), ("", "none")):
        (released / file).write_text(text.replace("0.1.0", other))
        assert RELEASE.check(released, "v0.1.0")[0] == [f"{file} says {said}, not 0.1.0"]


def test_every_action_is_pinned_by_commit() -> None:
    used = [line for line in WORKFLOW.read_text().splitlines() if "uses:" in line]
    assert len(used) > 5
    assert [line for line in used if not re.search(r"uses: [\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line)] == []


def test_each_job_may_do_only_what_it_needs() -> None:
    text = WORKFLOW.read_text()
    assert "\npermissions: {}\n" in text
    signing = {"contents": "read", "packages": "write", "id-token": "write"}
    assert {name: job["permissions"] for name, job in jobs().items()} == {
        "check": {"contents": "read"},
        "image": signing,
        "chart": signing,
        "publish": {"contents": "write"},
    }


def test_nothing_is_pushed_before_all_tests_passed_and_what_is_pushed_is_signed() -> None:
    found = jobs()
    assert ".ci/run" in found["check"]["steps"][-1]["run"]
    assert "check" in found["image"]["needs"]
    assert {row["flavor"] for row in found["image"]["strategy"]["matrix"]["include"]} == {"cpu", "cuda"}
    for name in ("image", "chart"):
        scripts = [step["run"] for step in found[name]["steps"] if "run" in step]
        [pushes] = [at for at, script in enumerate(scripts) if " push " in script]
        assert any('cosign sign --yes "$PUSHED"' in script for script in scripts[pushes:])
    assert any("cosign attest" in step.get("run", "") for step in found["image"]["steps"])


def test_no_expression_stands_in_a_script() -> None:
    """What GitHub puts into a script is code there: values go through the environment."""
    scripts = [step["run"] for job in jobs().values() for step in job["steps"] if "run" in step]
    assert len(scripts) > 5
    assert [script for script in scripts if "${{" in script] == []


def test_the_scripts_are_those_that_bash_can_read() -> None:
    shell = shutil.which("bash")
    assert shell is not None
    for job in jobs().values():
        for step in job["steps"]:
            done = subprocess.run([shell, "-n", "-c", step.get("run", "")], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")


def test_the_linter_of_workflows_finds_nothing() -> None:
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if zizmor is None:
        pytest.skip("no zizmor: pip install zizmor")
    command = [zizmor, "--offline", "--no-progress", str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
