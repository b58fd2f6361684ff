"""Plots as inline SVG, made of strings: axes have titles and units, and what is drawn is all that there is.

A plot is a frame with two scales and layers in data's own units. Linear axes begin at zero where data are above it, so
that lengths can be compared; logarithmic ones say so by their ticks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLORS = ("#2563eb", "#d97706", "#dc2626", "#059669", "#7c3aed", "#475569")
Number = float | None
Line = tuple[str, list[Number], list[Number], bool]  # name, x, y, with dots?


@dataclass(frozen=True)
class Scale:
    """From ``low`` to ``high`` in data's units onto ``start`` to ``end`` in pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            digits = (1,) if last - first > 3 else (1, 2, 5)
            marks = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        else:
            step = nice((self.high - self.low) / 5)
            marks = [step * place for place in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [mark for mark in marks if self.low * 0.999999 <= mark <= self.high * 1.000001]


def nice(value: float) -> float:
    """The next of 1, 2, 5, 10, ... that is not below."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= value * 0.999999)


def short(value: float) -> str:
    """A tick's text."""
    if value and abs(value) >= 1e4:
        return f"{value / 1e3:,.4g}k" if abs(value) < 1e6 else f"{value / 1e6:,.4g}M"
    return f"{value:,.4g}"


@dataclass
class Plot:
    """``x_title`` and ``y_title`` say the unit. ``marks`` are vertical lines with a text, at a place on x; ``levels``
    horizontal ones; ``shades`` greyed parts of x."""

    title: str
    x_title: str
    y_title: str
    log_x: bool = False
    log_y: bool = False
    width: int = 560
    height: int = 300
    y_max: float | None = None
    marks: list[tuple[float, str]] = field(default_factory=list)
    levels: list[tuple[float, str]] = field(default_factory=list)
    shades: list[tuple[float, float, str]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    bars: list[tuple[float, float, float]] = field(default_factory=list)

    def line(self, name: str, x: Sequence[Number], y: Sequence[Number], *, dots: bool = False) -> None:
        """Broken where a value is None."""
        self.lines.append((name, list(x), list(y), dots))

    def bar(self, start: float, end: float, height: float) -> None:
        self.bars.append((start, end, height))

    def svg(self) -> str:
        xs = [x for _, values, _, _ in self.lines for x in values if x is not None]
        xs += [edge for start, end, _ in self.bars for edge in (start, end)]
        ys = [y for _, _, values, _ in self.lines for y in values if y is not None]
        ys += [height for _, _, height in self.bars]
        if not xs or not ys:
            return f'<figure><figcaption>{escape(self.title)}</figcaption><p class="none">no data</p></figure>'
        ys += [value for value, _ in self.levels]
        across = self._scale(xs, self.log_x, 64.0, self.width - 14.0, None)
        up = self._scale(ys, self.log_y, self.height - 46.0, 14.0 + 16 * (len(self.lines) > 1), self.y_max)
        parts = [*self._shades(across, up), *self._axes(across, up), *self._bars(across, up)]
        parts += [part for place, one in enumerate(self.lines) for part in self._line(place, one, across, up)]
        parts += self._marks(across, up)
        parts += self._legend()
        body = "\n".join(parts)
        return (
            f'<figure><figcaption>{escape(self.title)}</figcaption><svg viewBox="0 0 {self.width} {self.height}"'
            f' role="img" aria-label="{escape(self.title)}">\n{body}\n</svg></figure>'
        )

    def _scale(self, values: list[float], log: bool, start: float, end: float, most: float | None) -> Scale:
        low, high = min(values), most or max(values)
        if log:
            low = max(min((value for value in values if value > 0), default=1e-3), 1e-9)
            return Scale(low / 1.1, max(high, low * 1.5) * 1.1, start, end, log=True)
        if low >= 0:
            low = 0.0
        if high <= low:
            high = low + 1.0
        return Scale(low, high if most else high * 1.04, start, end)

    def _axes(self, across: Scale, up: Scale) -> list[str]:
        left, right, bottom, top = across.start, across.end, up.start, up.end
        parts = []
        for mark in across.ticks():
            x = across(mark)
            parts += [
                f'<line class="grid" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>',
                f'<text x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{short(mark)}</text>',
            ]
        for mark in up.ticks():
            y = up(mark)
            parts += [
                f'<line class="grid" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>',
                f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{short(mark)}</text>',
            ]
        middle = (top + bottom) / 2
        return [
            *parts,
            f'<path class="axis" d="M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"/>',
            f'<text class="title" x="{(left + right) / 2:.1f}" y="{self.height - 8}" text-anchor="middle">'
            f"{escape(self.x_title)}</text>",
            f'<text class="title" transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_title)}</text>",
        ]

    def _bars(self, across: Scale, up: Scale) -> list[str]:
        return [
            f'<rect class="bar" x="{across(start):.2f}" y="{up(height):.2f}"'
            f' width="{max(0.5, across(end) - across(start) - 0.5):.2f}" height="{up.start - up(height):.2f}"/>'
            for start, end, height in self.bars
            if height > 0
        ]

    def _line(self, place: int, one: Line, across: Scale, up: Scale) -> list[str]:
        _, xs, ys, dots = one
        color, runs, pen = COLORS[place % len(COLORS)], [], "M"
        points = []
        for x, y in zip(xs, ys, strict=True):
            if x is None or y is None or (self.log_y and y <= 0):
                pen = "M"
                continue
            points.append((across(x), up(min(y, up.high))))
            runs.append(f"{pen}{points[-1][0]:.1f} {points[-1][1]:.1f}")
            pen = "L"
        parts = [f'<path class="line" stroke="{color}" d="{"".join(runs)}"/>']
        if dots or len(points) <= 40:
            parts += [f'<circle fill="{color}" cx="{x:.1f}" cy="{y:.1f}" r="{3 if dots else 1.6}"/>' for x, y in points]
        return parts

    def _shades(self, across: Scale, up: Scale) -> list[str]:
        parts = []
        for start, end, text in self.shades:
            left, right = across(max(start, across.low)), across(min(end, across.high))
            if right > left:
                parts.append(f'<rect class="shade" x="{left:.1f}" y="{up.end:.1f}" width="{right - left:.1f}"'
                             f' height="{up.start - up.end:.1f}"><title>{escape(text)}</title></rect>')  # fmt: skip
        return parts

    def _marks(self, across: Scale, up: Scale) -> list[str]:
        parts = []
        for place, (value, text) in enumerate(self.marks):
            if not across.low <= value <= across.high:
                continue
            x = across(value)
            side = "end" if x > (across.start + across.end) * 0.6 else "start"
            shift = -4 if side == "end" else 4
            # Latency curves rise: what is written at the foot hides none of them.
            y = up.end + 10 + 12 * (place % 4) if self.bars else up.start - 6
            parts += [
                f'<line class="mark" x1="{x:.1f}" y1="{up.end:.1f}" x2="{x:.1f}" y2="{up.start:.1f}"/>',
                f'<text class="marked" x="{x + shift:.1f}" y="{y:.1f}" text-anchor="{side}">{escape(text)}</text>',
            ]
        left, right = across.start, across.end
        for value, text in self.levels:
            y = up(value)
            parts += [
                f'<line class="mark" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>',
                f'<text class="marked" x="{left + 4:.1f}" y="{y - 4:.1f}">{escape(text)}</text>',
            ]
        return parts

    def _legend(self) -> list[str]:
        if len(self.lines) < 2:
            return []
        parts, x = [], 66.0
        for place, (name, *_) in enumerate(self.lines):
            color = COLORS[place % len(COLORS)]
            parts.append(f'<line stroke="{color}" stroke-width="3" x1="{x:.0f}" y1="9" x2="{x + 14:.0f}" y2="9"/>'
                         f'<text x="{x + 18:.0f}" y="13">{escape(name)}</text>')  # fmt: skip
            x += 32 + 6.3 * len(name)
        return parts


def ratios(title: str, rows: Sequence[tuple[str, float, Number, Number, str]]) -> str:
    """A line a figure: its name, the ratio, the interval's ends (or None) and a color, on one logarithmic axis."""
    values = [value for _, *three, _ in rows for value in three if value is not None]
    most = min(10.0, max([1.1, *values, *(1 / value for value in values)]))
    half = (1.05, 1.1, 1.2) if most < 1.5 else (1.2, 1.5, 2.0) if most < 3 else (2.0, 5.0, 10.0)
    width, top, line = 760, 22.0, 20.0
    bottom = top + line * len(rows)
    across = Scale(1 / most, most, 210.0, width - 20.0, log=True)
    parts = []
    for mark in (*(1 / value for value in half), 1.0, *half):
        if not across.low <= mark <= across.high:
            continue
        x, kind = across(mark), "one" if mark == 1 else "grid"
        parts += [
            f'<line class="{kind}" x1="{x:.1f}" y1="{top - 6:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>',
            f'<text x="{x:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{mark:.3g}</text>',
        ]
    for place, (name, ratio, low, high, color) in enumerate(rows):
        y = top + line * place + line / 2
        parts.append(f'<text x="200" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        if low is not None and high is not None:
            left, right = across(max(low, across.low)), across(min(high, across.high))
            ends = f'x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"'
            parts.append(f'<line stroke="{color}" stroke-width="3" {ends}/>')
        parts.append(f'<circle fill="{color}" cx="{across(min(ratio, across.high)):.1f}" cy="{y:.1f}" r="4"/>')
    height, middle = bottom + 42, (across.start + across.end) / 2
    parts.append(
        f'<text class="title" x="{middle:.1f}" y="{height - 8:.1f}" text-anchor="middle">'
        "ratio (logarithmic) and its 95% interval</text>"
    )
    body = "\n".join(parts)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {width} {height:.0f}" role="img"'
        f' aria-label="{escape(title)}">\n{body}\n</svg></figure>'
    )
