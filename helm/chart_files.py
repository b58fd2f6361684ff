"""What the chart has from elsewhere, written into it: schema, README, dashboards, rules; and k8s/, made of it.

``make chart`` runs this; a test compares. Helm reads nothing outside the chart, so dashboards and rules are copies.
"""

import json
import shutil
import sys
from pathlib import Path

import plain
import readme
import values_schema

ROOT = Path(__file__).parent.parent
CHART = ROOT / "helm" / "mizzen"
COPIES = {"dashboards": "docker/grafana/dashboards/*.json", "rules": "docker/prometheus/*.yml"}
RULES = ("recording.yml", "alerts.yml")


def generated() -> dict[Path, str]:
    """Every file that is made here, without k8s/, which needs Helm."""
    files = {
        CHART / "values.schema.json": json.dumps(values_schema.schema(), indent=2) + "\n",
        CHART / "README.md": readme.render(),
    }
    for folder, pattern in COPIES.items():
        for path in sorted(ROOT.glob(pattern)):
            if folder == "dashboards" or path.name in RULES:
                files[CHART / "files" / folder / path.name] = path.read_text()
    return files


def main() -> int:
    for path, text in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made = plain.files()
    shutil.rmtree(ROOT / "k8s", ignore_errors=True)
    for name, text in made.items():
        path = ROOT / "k8s" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
