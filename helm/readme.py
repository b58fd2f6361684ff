"""The chart's README: a table of values.yaml, with what its comments say."""

import re
from pathlib import Path

CHART = Path(__file__).parent / "mizzen"
LINE = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]\w*):(?P<value>.*?)(?:  ?# (?P<comment>.*))?$")
HEAD = """# mizzen

An OpenAI-compatible LLM server on Kubernetes 1.28 to 1.37, with Helm 3 or 4. The repository's `docs/kubernetes.md` says
how things work together.

```sh
helm install llm . -n serving --create-namespace -f examples/h200.yaml \\
    --set image.repository=registry.example.com/mizzen
helm test llm -n serving
```

`values.schema.json` is closed: a wrong key or value is refused by its name. Values that could never work together are
refused in one line.

## Values

| value | default | |
|---|---|---|
"""


def rows(text: str) -> list[tuple[str, str, str]]:
    """Of values.yaml: path, default, and the comment behind the value or above it; no sections without a comment."""
    found = []
    path: list[tuple[int, str]] = []
    above: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith("#"):
            above.append(line.strip().lstrip("# "))
            continue
        match = LINE.match(line)
        if match:
            indent = len(match["indent"])
            path = [part for part in path if part[0] < indent] + [(indent, match["key"])]
            comment = " ".join([*above, match["comment"] or ""]).strip()
            value = match["value"].strip()
            if value or comment:
                found.append((".".join(key for _, key in path), value, comment))
        above = []
    return found


def render() -> str:
    lines = []
    for path, default, comment in rows((CHART / "values.yaml").read_text()):
        shown = f"`{default}`" if default else ""
        lines.append(f"| `{path}` | {shown} | {comment.replace('|', chr(92) + '|')} |\n")
    return HEAD + "".join(lines)
