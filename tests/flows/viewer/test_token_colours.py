"""Texts are far enough from the grounds that they stand on: named colours, and tokens in any of their shades."""

import re

import pytest

from flows.viewer.rendering import STATIC

CSS = "".join((STATIC / name).read_text(encoding="utf-8") for name in ("base.css", "trace.css"))
COLOURS = {name: both for name, *both in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", CSS)}
SHARES = {
    name: share for names, share in re.findall(r"([.k\w, ]+) \{ --k: (\d+)%", CSS) for name in names.strip().split(", ")
}
MIXED = re.findall(r"([^{}]*)\{ background: color-mix\(in srgb, var\(--(\w+)\) (\d*)", CSS)
GROUNDS = [
    (name, top, int(share or SHARES[name]) / 100)
    for selector, top, share in MIXED
    for name in re.findall(r"\.k\w\b", selector)
]
LEAST = 4.5
"""The contrast that WCAG 2.2 asks of text (1.4.3, AA)."""
TEXT = ("ink", "soft", "accent", "good", "bad", "warn", *(f"c{number}" for number in range(8)))
PAIRS = [(text, ground) for text in TEXT for ground in ("ground", "card", "raised", "accent-ground")]
PAIRS += [(name, f"{name}-ground") for name in ("good", "bad", "warn", "accent")]


def colour(text):
    """Return red, green and blue of a colour such as #01cdef, each from 0 to 1."""
    return [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def contrast(*colours):
    """Return the contrast of two colours as WCAG defines it, from 1 to 21."""
    linear = [[each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in of] for of in colours]
    dark, bright = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in linear)
    return (bright + 0.05) / (dark + 0.05)


def test_the_contrast_is_that_of_wcag():
    black, grey, white = map(colour, ("#000000", "#777777", "#ffffff"))
    assert contrast(black, white) == 21 and contrast(white, grey) < LEAST


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_named_colour_can_be_read_on_every_ground(scheme):
    named = {name: colour(both[scheme]) for name, both in COLOURS.items()}
    assert [(text, ground) for text, ground in PAIRS if contrast(named[text], named[ground]) < LEAST] == []


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("below", ["card", "raised"])
def test_text_on_the_ground_of_a_token_has_contrast(scheme, below):
    assert len(GROUNDS) > 20
    named = {name: colour(both[scheme]) for name, both in COLOURS.items()}
    pale = {}
    for name, top, share in GROUNDS:
        ground = [share * over + (1 - share) * under for over, under in zip(named[top], named[below], strict=True)]
        if (found := contrast(ground, named["ink"])) < LEAST:
            pale[name] = found
    assert pale == {}
