"""The README's settings reference, made from ``Settings``: ``python -m mizzen.config.reference`` prints it."""

from mizzen.config.settings import Settings, allowed, default_text, variable

BEGIN = "<!-- settings: begin (python -m mizzen.config.reference) -->"
END = "<!-- settings: end -->"


def render() -> str:
    """A Markdown table for each group of settings."""
    groups: dict[str, list[str]] = {}
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        default = default_text(field)
        cells = [f"`{variable(name)}`", f"`{default}`" if default else "", allowed(field), field.description or ""]
        groups.setdefault(str(extra["group"]), []).append("| " + " | ".join(cells) + " |")
    head = "| Variable | Default | Allowed | Meaning |\n|---|---|---|---|\n"
    return "\n\n".join(f"**{title}**\n\n{head}" + "\n".join(rows) for title, rows in groups.items()) + "\n"


def embedded(text: str) -> str | None:
    """What stands between the markers in ``text``, or None without markers."""
    _, begin, rest = text.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    return inside.strip() + "\n" if begin and end else None


if __name__ == "__main__":
    print(render(), end="")
