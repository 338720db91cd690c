"""The colours of the pages: one a variant, readable, and apart for the colour-blind."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from referee.pages.html_page import COLORS, asset
from study.arm_colors import color, palette_index


def test_every_known_variant_has_one_colour_on_all_pages() -> None:
    names = ["B", "RAEARLY", "RALATE", "RAALL", "RAALT", "RALEARN", "MINE", "OTHER"]
    colours = [color(name, names) for name in names]
    assert len(set(colours)) == len(colours)
    assert [color(name, ["B"]) for name in names[:6]] == colours[:6]
    style = asset("page.css")
    assert all(style.count(f"--v{place}:") == 3 for place in range(COLORS))  # light, dark, print


@given(st.lists(st.text(min_size=1), max_size=20, unique=True))
def test_a_palette_index_is_in_the_palette(names: list[str]) -> None:
    assert all(0 <= palette_index(name, names) < COLORS for name in names)


def linear(code: str) -> np.ndarray:
    """A colour #rrggbb as linear RGB."""
    values = np.array([int(code[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def palettes() -> list[dict[str, np.ndarray]]:
    """The colours of light, dark and print as linear RGB."""
    blocks = re.findall(r":root \{(.*?)\}", asset("page.css"), re.DOTALL)
    return [
        {name: linear(code) for name, code in re.findall(r"--([\w]+): (#[0-9a-f]{6})", block)}
        for block in blocks
    ]


WEIGHTS = np.array([0.2126, 0.7152, 0.0722])  # WCAG 2: relative luminance


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    """The contrast ratio of WCAG 2 of two colours in linear RGB: 1 to 21."""
    lighter, darker = sorted((float(one @ WEIGHTS), float(other @ WEIGHTS)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_texts_are_legible_in_light_dark_and_print() -> None:
    inks = [*(f"v{place}" for place in range(COLORS)), "ink", "soft", "good", "bad", "accent"]
    for palette in palettes():
        for name in inks:
            assert contrast(palette[name], palette["page"]) >= 4.5, name
        for name in ("ink", "soft", "good", "bad", "accent"):  # of buttons, boxes and the verdict
            assert contrast(palette[name], palette["raised"]) >= 4.5, name
        assert contrast(palette["noise"], palette["raised"]) >= 3  # the edge of a field
        assert contrast(palette["noise"], palette["page"]) >= 3


def lab(colour: np.ndarray) -> np.ndarray:
    """CIE L*a*b*, D65, of linear RGB."""
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = matrix @ np.clip(colour, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(
    "matrix",
    [  # Machado, Oliveira and Fernandes 2009, severity 1.0: protanopia, deuteranopia
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    ],
)
def test_colours_of_known_variants_differ_for_the_colour_blind(matrix: list[list[float]]) -> None:
    for palette in palettes():
        observed = [lab(np.array(matrix) @ palette[f"v{place}"]) for place in range(6)]
        apart = [float(np.linalg.norm(a - b)) for place, a in enumerate(observed) for b in observed[:place]]
        assert min(apart) > 15, apart
