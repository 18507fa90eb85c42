"""Small curves as SVG text: readable on a light background, a few kilobytes, no script and no outside font."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 40
MOST_POINTS = 200
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")


@dataclass(frozen=True)
class Point:
    """A step's mean and its spread (0 for none)."""

    step: float
    mean: float
    spread: float = 0.0


def curve_svg(points: Sequence[Point], title: str, label: str = "reward") -> str:
    """Return the curve with a band of one spread around it; points that are not finite are left out."""
    shown = _shown(points)
    if not shown:
        return _svg(title, _text(WIDTH / 2, HEIGHT / 2, "no scored step yet", "middle"))
    axes = _Axes.around([shown])
    end = f"{label} {shown[-1].mean:.3f} at step {shown[-1].step:g}"
    body = axes.drawn() + axes.band(shown, COLOURS[0]) + axes.line(shown, COLOURS[0])
    return _svg(title, body + _text(WIDTH - RIGHT, 20, end, "end"))


def curves_svg(series: Mapping[str, Sequence[Point]], title: str) -> str:
    """Return several curves by name, told apart by colour and legend; those without a point are left out."""
    shown = {name: found for name, points in series.items() if (found := _shown(points))}
    if not shown:
        return _svg(title, _text(WIDTH / 2, HEIGHT / 2, "no scored step yet", "middle"))
    axes = _Axes.around(list(shown.values()))
    lines, legend = "", ""
    for place, (name, points) in enumerate(shown.items()):
        colour = COLOURS[place % len(COLOURS)]
        lines += axes.line(points, colour)
        y = HEIGHT - BOTTOM - 12 - 16 * (len(shown) - 1 - place)
        legend += f'<path d="M{WIDTH - 190} {y - 4}h20" stroke="{colour}" stroke-width="2"/>'
        legend += _text(WIDTH - 164, y, f"{name} {points[-1].mean:.3f}", "start")
    return _svg(title, axes.drawn() + lines + legend)


def _shown(points: Sequence[Point]) -> list[Point]:
    return thinned([point for point in points if math.isfinite(point.mean) and math.isfinite(point.spread)])


def _svg(title: str, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="#333"><rect width="100%" height="100%" fill="#fff"/>'
        f"{_text(LEFT, 20, title, 'start', 14)}{body}</svg>"
    )


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most `most` points, each the mean of as many neighbours as needed; the last one stays as it is."""
    if len(points) <= most:
        return list(points)
    width = math.ceil((len(points) - 1) / (most - 1))
    groups = [points[start : min(start + width, len(points) - 1)] for start in range(0, len(points) - 1, width)]
    means = [
        Point(*(sum(values) / len(group) for values in zip(*((p.step, p.mean, p.spread) for p in group), strict=True)))
        for group in groups
    ]
    return [*means, points[-1]]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers within [low, high], steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / (most - 1)
    exponent = math.floor(math.log10(rough))
    power = 10.0**exponent
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    # To a digit of the width, however small it is: 3 * 0.2 is 0.6, and 1e-14 is not zero.
    return [round(number * width, 1 - exponent) for number in range(first, last + 1)]


@dataclass(frozen=True)
class _Axes:
    """Where values lie on the page."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def around(cls, series: Sequence[Sequence[Point]]) -> "_Axes":
        points = [point for each in series for point in each]
        first = min(point.step for point in points)
        return cls(
            first,
            max(first + 1, *(point.step for point in points)),
            min(0.0, *(point.mean - point.spread for point in points)),
            max(1.0, *(point.mean + point.spread for point in points)),
        )

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def band(self, points: Sequence[Point], colour: str) -> str:
        upper = [f"{self.x(p.step):.1f},{self.y(p.mean + p.spread):.1f}" for p in points]
        lower = [f"{self.x(p.step):.1f},{self.y(p.mean - p.spread):.1f}" for p in reversed(points)]
        return f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" fill-opacity="0.15"/>'

    def line(self, points: Sequence[Point], colour: str) -> str:
        line = " ".join(f"{self.x(p.step):.1f},{self.y(p.mean):.1f}" for p in points)
        end = points[-1]
        return (
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<circle cx="{self.x(end.step):.1f}" cy="{self.y(end.mean):.1f}" r="3.5" fill="{colour}"/>'
        )

    def drawn(self) -> str:
        """Return the axes with their ticks."""
        parts = [
            f'<path d="M{LEFT} {self.y(value):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            f"{_text(LEFT - 8, self.y(value) + 4, f'{value:g}', 'end')}"
            for value in ticks(self.low, self.high)
        ]
        parts += [
            f'<path d="M{self.x(step):.1f} {HEIGHT - BOTTOM}v5" stroke="#333"/>'
            f"{_text(self.x(step), HEIGHT - BOTTOM + 18, f'{step:g}', 'middle')}"
            for step in ticks(self.first, self.last, 9)
            if step == int(step)
        ]
        parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#333"/>')
        return "".join([*parts, _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "step", "middle")])


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
