"""The dashboards' JSON is a function of the list in panels.py: change that, run this, check both in.

    python docker/grafana/generate.py

writes dashboards/*.json beside this file. The JSON is Grafana's dashboard model, schema version 39 (Grafana 11).
"""

import json
from pathlib import Path
from typing import Any

from panels import DASHBOARDS, Dashboard, Panel, Query, Row

FOLDER = Path(__file__).parent / "dashboards"
SCHEMA_VERSION = 39
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
PANEL_WIDTH, PANEL_HEIGHT, GRID_WIDTH = 8, 7, 24  # of Grafana's grid
STAT_WIDTH, STAT_HEIGHT = 4, 4


def _size(panel: Panel) -> tuple[int, int]:
    return (STAT_WIDTH, STAT_HEIGHT) if panel.kind == "stat" else (PANEL_WIDTH * panel.columns, PANEL_HEIGHT)


def _target(index: int, query: Query, panel: Panel) -> dict[str, Any]:
    instant = panel.kind in ("stat", "table")
    target = {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expression,
        "instant": instant,
        "legendFormat": query.legend or "__auto",
        "range": not instant,
        "refId": chr(ord("A") + index),
    }
    if panel.kind in ("heatmap", "table"):
        target["format"] = panel.kind
    return target


def _field_config(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        stacking = {"group": "A", "mode": "normal" if panel.stacked else "none"}
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": stacking,
        }
    if panel.thresholds:
        (first, *rest) = panel.thresholds
        steps = [{"color": first[1], "value": None}, *({"color": color, "value": value} for value, color in rest)]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {"defaults": defaults, "overrides": []}


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "heatmap":
            return {
                "calculate": False,
                "cellGap": 0,
                "color": {
                    "exponent": 0.5,
                    "fill": "dark-orange",
                    "mode": "scheme",
                    "reverse": False,
                    "scheme": "Turbo",
                    "steps": 64,
                },
                "exemplars": {"color": "rgba(255,0,255,0.7)"},
                "legend": {"show": True},
                "showValue": "never",
                "tooltip": {"mode": "single"},
                "yAxis": {"unit": panel.unit},
            }
        case "stat":
            return {
                "colorMode": "value",
                "graphMode": "none",
                "justifyMode": "auto",
                "orientation": "auto",
                "percentChangeColorMode": "standard",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "showPercentChange": False,
                "textMode": "auto",
                "wideLayout": True,
            }
        case "table":
            return {"frameIndex": 0, "showHeader": True}
        case "timeseries":
            legend = {"calcs": ["mean", "max"], "displayMode": "table", "placement": "bottom", "showLegend": True}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    width, height = _size(panel)
    rendered: dict[str, Any] = {
        "datasource": DATASOURCE,
        "description": panel.description,
        "fieldConfig": _field_config(panel),
        "gridPos": {"h": height, "w": width, "x": x, "y": y},
        "id": number,
        "options": _options(panel),
        "targets": [_target(index, query, panel) for index, query in enumerate(panel.queries)],
        "title": panel.title,
        "type": panel.kind,
    }
    if panel.kind == "table":  # one row a series, its labels as columns
        hidden = {"Time": True, "__name__": True, "job": True, "engine": True}
        rendered["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return rendered


def _row(number: int, row: Row, y: int) -> dict[str, Any]:
    position = {"h": 1, "w": GRID_WIDTH, "x": 0, "y": y}
    return {"collapsed": False, "gridPos": position, "id": number, "panels": [], "title": row.title, "type": "row"}


def _panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    """From left to right, and down where a panel does not fit; a row's title on a line of its own."""
    rendered: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        rendered.append(_row(len(rendered) + 1, row, y))
        x, y, line_height = 0, y + 1, 0
        for panel in row.panels:
            width, height = _size(panel)
            if x + width > GRID_WIDTH:
                x, y, line_height = 0, y + line_height, 0
            rendered.append(_panel(len(rendered) + 1, panel, x, y))
            x, line_height = x + width, max(line_height, height)
        y += line_height
    return rendered


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    def labels_of(name: str, label: str, query: str) -> dict[str, Any]:
        return {
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "datasource": DATASOURCE,
            "includeAll": True,
            "label": label,
            "multi": True,
            "name": name,
            "query": {"query": query, "refId": name},
            "refresh": 2,  # whenever the time range changes
            "sort": 1,
            "type": "query",
        }

    datasource = {"label": "Data source", "name": "datasource", "query": "prometheus", "refresh": 1}
    return [
        {"hide": 0, "includeAll": False, "multi": False, "type": "datasource", **datasource},
        *(labels_of(*variable) for variable in dashboard.variables),
    ]


def render(dashboard: Dashboard) -> dict[str, Any]:
    """One dashboard in Grafana's JSON model."""
    return {
        "annotations": {"list": []},
        "description": dashboard.description,
        "editable": False,
        "graphTooltip": 1,  # one crosshair for all panels
        "id": None,
        "links": [
            {
                "asDropdown": False,
                "icon": "external link",
                "includeVars": True,
                "keepTime": True,
                "tags": ["mizzen"],
                "targetBlank": False,
                "title": "Mizzen",
                "tooltip": "",
                "type": "dashboards",
            }
        ],
        "panels": _panels(dashboard),
        "refresh": "10s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["mizzen"],
        "templating": {"list": _variables(dashboard)},
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "title": f"Mizzen / {dashboard.title}",
        "uid": f"mizzen-{dashboard.name}",
        "version": 1,
    }


def text(dashboard: Dashboard) -> str:
    return json.dumps(render(dashboard), indent=2) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(text(dashboard))


if __name__ == "__main__":
    main()
