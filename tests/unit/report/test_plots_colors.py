"""The colors of charts: enough contrast, told apart with any kind of color blindness, readable in gray."""

import re

import numpy as np
import pytest

from coterie.report import plots
from coterie.report.page import load_asset

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHTS = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
# Ottosson's Oklab, in which equal distances look equally far apart: linear RGB to cone responses,
# their roots to Lab.
CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
PALETTES = ("METHOD_COLORS", "METHOD_COLORS_DARK", "CLUSTER_COLORS", "CLUSTER_COLORS_DARK")


def linear(colors):
    share = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colors]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def listed(name):
    """A palette as the page's script says it."""
    found = re.search(rf"const {name} = \[([^\]]+)\]", load_asset("core.js"))
    assert found is not None
    return re.findall(r"#[0-9A-Fa-f]{6}", found[1])


def grounds(name):
    """What lies behind the charts in the theme of a palette: the page, and what is raised from it."""
    light, dark = load_asset("report.css").split(':root[data-theme="dark"]', 1)
    return re.findall(
        r"--(?:page|raised): (#[0-9a-f]{6})", dark if name.endswith("DARK") else light
    )


def luminance(colors):
    return linear(colors) @ np.array([0.2126, 0.7152, 0.0722])


def contrast(colors, back):
    pair = np.stack([luminance(colors), np.broadcast_to(luminance([back]), len(colors))]) + 0.05
    return pair.max(0) / pair.min(0)


@pytest.mark.parametrize(
    ("colors", "expected"), [("#000000", 21.0), ("#767676", 4.54), ("#ffffff", 1.0)]
)
def test_contrast_is_that_of_wcag(colors, expected):
    """Black on white is 21 to 1, and 4.54 for the gray that the guidelines name."""
    assert contrast([colors], "#ffffff")[0] == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("name", PALETTES)
def test_every_color_stands_out_from_its_page(name):
    """WCAG 1.4.11: 3 to 1 for graphics, on both grounds of the theme."""
    backs = grounds(name)
    assert len(backs) == 2
    for back in backs:
        assert contrast(listed(name), back).min() >= 3.0


@pytest.mark.parametrize("name", PALETTES)
@pytest.mark.parametrize("sight", SIGHTS)
def test_colors_are_told_apart_with_any_sight(name, sight):
    """Distances in Oklab: .08 between any two of eight, .13 between the first four; .02 can just be seen."""
    seen = np.clip(linear(listed(name)) @ SIGHTS[sight].T, 0, 1)
    places = np.cbrt(seen @ CONES.T) @ LAB.T
    apart = np.linalg.norm(places[:, None] - places, axis=-1) + np.eye(len(places))
    assert len(places) == 8
    assert apart.min() >= 0.08
    assert apart[:4, :4].min() >= 0.13


def test_a_gray_copy_tells_lines_and_points_by_dash_and_shape():
    """Eight dashes and eight shapes, all different, in figures and in the page."""
    script = load_asset("core.js")
    for name in ("DASHES", "MARKS", "GLYPHS"):
        found = re.search(rf"const {name} = \[(.*?)\];", script, re.DOTALL)
        assert found is not None
        parts = re.findall(r'"[^"]+"|\[[^\]]+\]', found[1])
        assert len(parts) == len(set(parts)) == 8
    for own in (plots.DASHES, plots.MARKS):
        assert len(own) == len(set(own)) == 8


def test_sixty_four_methods_differ_from_one_another():
    """The ninth has the color of the first with another dash and another mark."""
    looks = [tuple(map(str, plots.select_style(place).values())) for place in range(64)]
    assert len(set(looks)) == 64
    assert plots.select_style(8)["color"] == plots.select_style(0)["color"]
    assert plots.select_style(8)["linestyle"] != plots.select_style(0)["linestyle"]
    assert plots.select_style(8)["marker"] != plots.select_style(0)["marker"]


def test_figures_have_the_colors_of_the_page():
    """One palette for methods, so that a figure and the report can be read together."""
    assert list(plots.COLORS) == listed("METHOD_COLORS")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_scale_of_heatmaps_is_even_in_gray(theme):
    """Darker and darker in the light theme, lighter and lighter in the dark one, so that a copy in gray can be read."""
    found = re.search(rf"  {theme}: (\[\[.*?\]\]),", load_asset("core.js"))
    assert found is not None
    stops = [[int(n) for n in stop.split(",")] for stop in re.findall(r"\[([\d, ]+)\]", found[1])]
    steps = np.diff(luminance([f"#{r:02x}{g:02x}{b:02x}" for r, g, b in stops]))
    assert (steps < 0).all() if theme == "light" else (steps > 0).all()
