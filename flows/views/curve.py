"""A small reward curve as SVG text: readable on a light background, a few kilobytes, no script and no outside font."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 40
MOST_POINTS = 200


@dataclass(frozen=True)
class Point:
    """A step's mean and its spread (0 for none)."""

    step: float
    mean: float
    spread: float = 0.0


def curve_svg(points: Sequence[Point], title: str, label: str = "reward") -> str:
    """Return the curve with a band of one spread around it; points that are not finite are left out."""
    shown = thinned([point for point in points if math.isfinite(point.mean) and math.isfinite(point.spread)])
    body = _drawing(shown, label) if shown else _text(WIDTH / 2, HEIGHT / 2, "no scored step yet", "middle")
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
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [round(number * width, 12) for number in range(first, last + 1)]


def _drawing(points: Sequence[Point], label: str) -> str:
    """Draw axes with ticks, the band and the line."""
    first, last = points[0].step, max(points[-1].step, points[0].step + 1)
    low = min(0.0, *(point.mean - point.spread for point in points))
    high = max(1.0, *(point.mean + point.spread for point in points))

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        f"{_text(LEFT - 8, y(value) + 4, f'{value:g}', 'end')}"
        for value in ticks(low, high)
    ]
    parts += [
        f'<path d="M{x(step):.1f} {HEIGHT - BOTTOM}v5" stroke="#333"/>'
        f"{_text(x(step), HEIGHT - BOTTOM + 18, f'{step:g}', 'middle')}"
        for step in ticks(first, last, 9)
        if step == int(step)
    ]
    upper = [f"{x(p.step):.1f},{y(p.mean + p.spread):.1f}" for p in points]
    lower = [f"{x(p.step):.1f},{y(p.mean - p.spread):.1f}" for p in reversed(points)]
    line = [f"{x(p.step):.1f},{y(p.mean):.1f}" for p in points]
    parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="#1f77b4" fill-opacity="0.15"/>')
    parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="#1f77b4" stroke-width="2"/>')
    end = points[-1]
    parts.append(f'<circle cx="{x(end.step):.1f}" cy="{y(end.mean):.1f}" r="3.5" fill="#1f77b4"/>')
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#333"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "step", "middle"))
    parts.append(_text(WIDTH - RIGHT, 20, f"{label} {end.mean:.3f} at step {end.step:g}", "end"))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
