"""What is made of the chart, or for it, by `make chart`; and what it says when it is installed."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import chart
import chart_files
import plain
import pytest
import readme
import yaml


def test_the_charts_schema_readme_and_copies_are_up_to_date() -> None:
    for path, text in chart_files.generated().items():
        assert path.read_text() == text, f"{path} is old: run `make chart`"


def leaves(tree: Any, prefix: str = "") -> set[str]:
    if not isinstance(tree, dict) or not tree:
        return {prefix}
    return set().union(*(leaves(value, f"{prefix}.{key}") for key, value in tree.items()))


def test_every_value_has_a_schema_and_every_schema_but_the_settings_a_value() -> None:
    def named(schema: Any, prefix: str = "") -> set[str]:
        if "properties" not in schema:
            return {prefix}
        return set().union(*(named(value, f"{prefix}.{key}") for key, value in schema["properties"].items()))

    open_ones = (".config.", ".global", ".podSecurityContext", ".securityContext", ".monitoring.dashboardLabels")
    open_ones += (".resources.", ".loadTest.resources.")
    values = leaves(yaml.safe_load((chart.CHART / "values.yaml").read_text()))
    schema = named(json.loads((chart.CHART / "values.schema.json").read_text()))
    assert {path for path in values if not path.startswith(open_ones)} == {
        path for path in schema if not path.startswith(open_ones)
    }


def test_the_readme_has_a_row_for_every_value() -> None:
    """But for those within a map that is shown whole."""
    shown = {f".{path}" for path, _, _ in readme.rows((chart.CHART / "values.yaml").read_text())}
    values = leaves(yaml.safe_load((chart.CHART / "values.yaml").read_text()))
    assert {path for path in values if path not in shown and path.rpartition(".")[0] not in shown} == set()


def test_a_comment_of_the_values_is_in_the_readme() -> None:
    text = "# above\nsection:\n  key: 1  # beside\n  plain: [a, b]\n"
    assert readme.rows(text) == [
        ("section", "", "above"),
        ("section.key", "1", "beside"),
        ("section.plain", "[a, b]", ""),
    ]


def test_the_chart_installs_the_version_beside_it() -> None:
    project = tomllib.loads((chart.ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((chart.CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


def test_k8s_holds_what_the_chart_renders() -> None:
    made = plain.files(helm=chart.tool("helm"))
    folder = chart.ROOT / "k8s"
    held = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert set(held) == set(made), "run `make chart`"
    for name, text in made.items():
        assert list(yaml.safe_load_all(held[name])) == list(yaml.safe_load_all(text)), f"k8s/{name}: run `make chart`"


def normalised(tree: Any) -> Any:
    """Lists that kubectl merges are sets by name: their order says nothing."""
    if isinstance(tree, dict):
        found = {key: normalised(value) for key, value in tree.items()}
        for key, by in plain.MERGE_KEYS.items():
            if isinstance(found.get(key), list):
                found[key] = sorted(found[key], key=lambda element: str(element[by]))
        return found
    return [normalised(part) for part in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("name", ["base", *plain.OVERLAYS])
def test_kubectl_makes_of_an_overlay_what_helm_makes_of_its_example(name: str) -> None:
    command = [chart.tool("kubectl"), "kustomize", str(chart.ROOT / "k8s" / name)]
    done = chart.run(command)
    assert done.returncode == 0, done.stderr
    built = {plain.identity(item): item for item in yaml.safe_load_all(done.stdout)}
    helm = chart.tool("helm")
    wanted = plain.objects(*plain.BASE, helm=helm) if name == "base" else plain.example(name, helm)
    assert normalised(built) == normalised(wanted)
    assert not {"Pod", "Secret"} & {item["kind"] for item in built.values()}
    assert "helm" not in done.stdout.lower()


def test_an_overlay_goes_to_another_namespace_by_one_line(tmp_path: Path) -> None:
    shutil.copytree(chart.ROOT / "k8s", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "h200-tp4" / "kustomization.yaml"
    file.write_text(file.read_text().replace("namespace: mizzen", "namespace: elsewhere"))
    done = chart.run([chart.tool("kubectl"), "kustomize", str(file.parent)])
    objects = list(yaml.safe_load_all(done.stdout))
    assert len(objects) > 5
    assert {item["metadata"]["namespace"] for item in objects} == {"elsewhere"}


def test_a_difference_merges_deletes_and_replaces() -> None:
    base = {"a": 1, "gone": 2, "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "other": [1]}
    wanted = {"a": 1, "env": [{"name": "A", "value": "3"}, {"name": "C", "value": "4"}], "other": [2], "new": {}}
    assert plain.difference(base, wanted) == {
        "gone": None,
        "env": [{"name": "A", "value": "3"}, {"name": "C", "value": "4"}, {"name": "B", "$patch": "delete"}],
        "other": [2],
        "new": {},
    }


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_the_notes_give_the_next_three_commands_for_this_release(kind: str) -> None:
    values = f"kind={kind},service.port=8080,startup.budgetSeconds=1800"
    notes = notes_of("--set", values)
    assert [line.strip() for line in notes.splitlines() if line.startswith("  ")] == [
        f"kubectl -n serving rollout status {kind.lower()}/llm-mizzen --timeout=1800s",
        "helm -n serving test llm",
        "kubectl -n serving port-forward service/llm-mizzen 8000:8080",
    ]
    assert "org/model is being loaded, which may take 30 minutes at most." in notes


def test_the_notes_warn_where_no_key_is_needed() -> None:
    assert "Requests need no key" in notes_of()
    assert "Requests need no key" not in notes_of("--set", "apiKeys.existingSecret=mine")


def notes_of(*arguments: str) -> str:
    """Of Helm 4: Helm 3 installs nothing, not even dry, without a cluster."""
    base = ("install", "llm", str(chart.CHART), "-n", "serving", "--dry-run=client", *chart.LEAST)
    done = chart.helm(*base, *arguments, name="helm4")
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:\n")[2]
