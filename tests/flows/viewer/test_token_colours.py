"""Every ground that a token can have is far enough from the text on it, whichever tokens a run happens to show."""

import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[3] / "flows/viewer/static"
CSS = "".join((STATIC / name).read_text(encoding="utf-8") for name in ("base.css", "trace.css"))
COLOURS = {name: both for name, *both in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", CSS)}
SHARES = {
    name: share for names, share in re.findall(r"([.k\w, ]+) \{ --k: (\d+)%", CSS) for name in names.strip().split(", ")
}
MIXED = re.findall(r"([^{}]*)\{ background: color-mix\(in srgb, var\(--(\w+)\) (\d*)", CSS)
GROUNDS = [
    (name, top, share or SHARES[name]) for selector, top, share in MIXED for name in re.findall(r"\.k\w\b", selector)
]
LEAST = 4.5
"""The contrast that WCAG 2.2 asks of text (1.4.3, AA)."""
Colour = tuple[float, ...]


def colour(name: str, scheme: int) -> Colour:
    """Return red, green and blue of a colour of the style sheets, each from 0 to 1."""
    text = COLOURS[name][scheme]
    return tuple(int(text[at : at + 2], 16) / 255 for at in (1, 3, 5))


def luminance(of: Colour) -> float:
    """Return the relative luminance as WCAG defines it."""
    linear = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in of)
    return sum(share * each for share, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("below", ["card", "raised"])
def test_text_on_the_ground_of_a_token_has_contrast(scheme, below):
    assert len(GROUNDS) > 20
    pale = {}
    for name, top, percent in GROUNDS:
        share = int(percent) / 100
        pairs = zip(colour(top, scheme), colour(below, scheme), strict=True)
        ground = luminance(tuple(share * over + (1 - share) * under for over, under in pairs))
        dark, bright = sorted((ground, luminance(colour("ink", scheme))))
        contrast = (bright + 0.05) / (dark + 0.05)
        pale |= {name: contrast} if contrast < LEAST else {}
    assert pale == {}
