"""Draws the dashboards as they would show the test's bad day, without Grafana: a PNG each.

PYTHONPATH=tests:docker/grafana python -m monitoring.draw docs/img
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

import generate
from monitoring.story import Day, a_day, fill
from panels import DASHBOARDS, Dashboard

mpl.use("Agg")

import matplotlib.pyplot as plt  # after the choice of the backend
from matplotlib.axes import Axes

CELL_WIDTH, CELL_HEIGHT = 0.75, 0.42  # inches of one cell of Grafana's grid


def legend(series: dict[str, Any], pattern: str) -> str:
    for name, value in series["metric"].items():
        pattern = pattern.replace("{{" + name + "}}", value)
    return "" if pattern == "__auto" else pattern


def times_and_values(series: dict[str, Any], start_s: float) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array([(float(at), float(value)) for at, value in series["values"]])
    return pairs[:, 0] - start_s, pairs[:, 1]


def draw_lines(axes: Axes, panel: dict[str, Any], day: Day) -> None:
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    grid = np.arange(0, day.end_s - day.start_s + 1)
    base = np.zeros_like(grid)
    for target in panel["targets"]:
        for series in day.prometheus.query_range(fill(target["expr"]), day.start_s, day.end_s):
            at, values = times_and_values(series, day.start_s)
            name = legend(series, target["legendFormat"])
            if stacked:
                every = np.zeros_like(grid)
                every[np.clip(np.round(at).astype(int), 0, len(grid) - 1)] = np.nan_to_num(values)
                axes.fill_between(grid, base, base + every, alpha=0.5, step="mid", label=name)
                base = base + every
            else:
                axes.plot(at, values, linewidth=1, label=name)
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=5, loc="upper left", ncols=2)


def draw_heatmap(axes: Axes, panel: dict[str, Any], day: Day) -> None:
    found = day.prometheus.query_range(fill(panel["targets"][0]["expr"]), day.start_s, day.end_s)
    found.sort(key=lambda series: float(series["metric"]["le"]))
    width = int(day.end_s - day.start_s) + 2
    counts = np.zeros((len(found), width))
    for row, series in enumerate(found):
        at, values = times_and_values(series, day.start_s)
        counts[row, np.round(at).astype(int)] = values
    cells = np.diff(counts, axis=0, prepend=0)  # Prometheus' buckets contain those below
    axes.imshow(np.where(cells > 0, cells, np.nan), origin="lower", aspect="auto", cmap="turbo", interpolation="none")
    ticks = range(0, len(found), 4)
    axes.set_yticks(list(ticks), [found[tick]["metric"]["le"] for tick in ticks])


def draw_text(axes: Axes, panel: dict[str, Any], day: Day) -> None:
    """Of a moment in which it is flooded: at the day's end everything is gone, in its middle the engine is."""
    axes.axis("off")
    at = day.start_s + 0.62 * (day.end_s - day.start_s)
    found = [series for target in panel["targets"] for series in day.prometheus.query(fill(target["expr"]), at)]
    if panel["type"] == "stat":
        axes.text(0.5, 0.45, f"{float(found[0]['value'][1]):.4g}", ha="center", va="center", fontsize=16)
        return
    labels = [f"{k} = {v}" for k, v in found[0]["metric"].items() if k not in ("__name__", "job", "engine")]
    axes.text(0.02, 0.95, "\n".join(labels), va="top", fontsize=6)


DRAW = {"timeseries": draw_lines, "heatmap": draw_heatmap, "stat": draw_text, "table": draw_text}


def draw(dashboard: Dashboard, day: Day, path: Path) -> None:
    rendered = generate.render(dashboard)["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in rendered)
    figure = plt.figure(figsize=(generate.GRID_WIDTH * CELL_WIDTH, height * CELL_HEIGHT))
    for panel in rendered:
        place = panel["gridPos"]
        left, width = place["x"] / generate.GRID_WIDTH, place["w"] / generate.GRID_WIDTH
        bottom, tall = 1 - (place["y"] + place["h"]) / height, place["h"] / height
        if panel["type"] == "row":
            figure.text(0.01, bottom + tall * 0.3, panel["title"], fontsize=11, weight="bold")
            continue
        axes = figure.add_axes((left + 0.028, bottom + 0.6 / height, width - 0.036, tall - 1.5 / height))
        axes.set_title(f"{panel['title']} [{panel['fieldConfig']['defaults']['unit']}]", fontsize=8)
        axes.tick_params(labelsize=6)
        DRAW[panel["type"]](axes, panel, day)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, a_day(Path(temporary)) as day:
        print(f"{day.end_s - day.start_s:.0f} s;", *(f"{name} {status}" for name, status in day.pages), sep="\n  ")
        for dashboard in DASHBOARDS:
            draw(dashboard, day, folder / f"dashboard-{dashboard.name}.png")


if __name__ == "__main__":
    main()
