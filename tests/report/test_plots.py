"""Plots: labels do not overlap, names are escaped, and no color or style is fixed."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from fedsim.report.placement import Box, place
from fedsim.report.plots import (
    Curve,
    Errors,
    Point,
    feature_errors,
    leakage_utility,
    training_curves,
)
from fedsim.report.svg import series_color


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314 - our own output


def point(label: str, series: int, accuracy: float, gain: float) -> Point:
    return Point(
        label=label, series=series, accuracy=accuracy, gain=gain, low=gain - 1, high=gain + 1
    )


@pytest.mark.parametrize("spread", [0.0, 5.0, 60.0, 300.0])
def test_labels_never_cover_each_other(spread: float) -> None:
    stream = np.random.default_rng(0)
    bounds = Box(0, 0, 600, 400)
    anchors = [(300 + x, 200 + y) for x, y in spread * (stream.random((14, 2)) - 0.5)]
    sizes = [(40 + 5.0 * i, 14.0) for i in range(14)]
    markers = [Box(x - 7, y - 7, x + 7, y + 7) for x, y in anchors]
    boxes = place(anchors, sizes, markers, bounds)
    assert all(a.overlap(b) == 0 for a, b in itertools.combinations(boxes, 2))
    for box, (width, height) in zip(boxes, sizes, strict=True):
        assert box.overlap(bounds) == pytest.approx(width * height)


def test_a_lone_label_is_beside_its_marker() -> None:
    marker = Box(93, 93, 107, 107)
    (box,) = place([(100, 100)], [(40, 14)], [marker], Box(0, 0, 400, 400))
    assert box.overlap(marker) == 0
    assert box.left - 100 < 12
    assert box.bottom < 100 < box.top


def test_plot_is_one_inline_element_with_the_pages_colors_and_fonts() -> None:
    points = [point("none", 0, 0.7, 9.0), point("dp", 1, 0.6, 0.2), point("prune", 9, 0.7, 9.0)]
    for svg in (
        leakage_utility(points, width=500, height=300),
        leakage_utility([point("none", 0, 0.7, 9.0)], width=300, height=300),
    ):
        root = parse(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("viewBox", "").startswith("0 0 ")
        assert root.get("role") == "img"
        assert "var(--c0)" in svg
        assert "var(--sans)" in svg
        assert "<style" not in svg
        assert "<metadata" not in svg
        assert not re.search(r"#[0-9a-f]{6}\b", svg)
        assert not re.search(r"(href|src)=\"(?!#)", svg)


def test_names_are_text_not_markup_nor_formulas() -> None:
    name = "<script>alert(1)</script> $x^2$ \\frac"
    svg = leakage_utility([point(name, 0, 0.7, 9.0)], width=500, height=300)
    assert "<script" not in svg
    texts = [element.text for element in parse(svg).iter() if element.text]
    assert name in texts


def test_labels_in_the_plot_keep_apart() -> None:
    points = [point(f"defense-{i}", i, 0.7 + 0.0001 * i, 5.0 + 0.01 * i) for i in range(8)]
    root = parse(leakage_utility(points, width=760, height=420))
    places = [
        tuple(float(v) for v in re.findall(r"[-\d.]+", element.get("transform", ""))[-2:])
        if element.get("x") is None
        else (float(element.get("x", "0")), float(element.get("y", "0")))
        for element in root.iter()
        if (element.text or "").startswith("defense-")
    ]
    assert len(places) == 8
    for a, b in itertools.combinations(places, 2):
        assert abs(a[1] - b[1]) > 11 or abs(a[0] - b[0]) > 55


def test_same_data_same_bytes() -> None:
    curve = Curve(label="none", series=0, accuracy=[(1, 0.2), (2, 0.5)], loss=[(1, 2.0)])
    draw = [training_curves([curve], width=400, height=200, stacked=False) for _ in range(2)]
    assert draw[0] == draw[1]
    assert draw[0] != training_curves([curve], width=400, height=400, stacked=True)


def test_colors_repeat_but_the_undefended_keeps_its_own() -> None:
    assert [series_color(i) for i in (0, 1, 7, 8, 14, 15)] == [
        "--c0",
        "--c1",
        "--c7",
        "--c1",
        "--c7",
        "--c1",
    ]


def test_errors_of_features_have_a_line_each_and_stay_on_the_plot() -> None:
    lines = [
        Errors(label="none", values=[(1, 0.0, 0.0, 0.0), (2, 0.8, 0.7, 0.9)]),
        Errors(label="<noise>", values=[(1, 0.02, None, None)]),
    ]
    rings = [Errors(label="none", values=lines[0].values, predicted=[(2, 0.5)]), lines[1]]
    assert len(feature_errors(rings, width=400)) > len(feature_errors(lines, width=400))
    svg = feature_errors(lines, width=400)
    root = parse(svg)
    texts = [element.text for element in root.iter() if element.text]
    assert {"none", "<noise>", "≤ 0.0001", "1"} <= set(texts)
    assert "var(--c1)" in svg
    assert "var(--c2)" in svg
    height, taller = (
        int(parse(feature_errors(lines * n, width=400)).get("viewBox", "").split()[3])
        for n in (1, 4)
    )
    assert height < taller


def test_rounds_are_whole_even_if_there_is_one() -> None:
    curve = Curve(label="none", series=0, accuracy=[(4, 0.5)], loss=[(1, 2.0), (2, 1.0), (4, 0.5)])
    drawn = parse(training_curves([curve], width=600, height=300, stacked=False))
    ticks = [
        "".join(text.itertext())
        for axis in drawn.iter("{http://www.w3.org/2000/svg}g")
        if (axis.get("id") or "").startswith("matplotlib.axis_")
        and any("round" in "".join(text.itertext()) for text in axis.iter())
        for text in axis.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert "4" in ticks
    assert ticks.count("round") == 2
    assert all(tick == "round" or tick.isdigit() for tick in ticks), ticks
