"""Charts: what they draw lies where it belongs, is described, and becomes no markup."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsim.report.charts import (
    _ChartAxis,
    _draw_chart,
    _list_accused,
    _move_apart,
    _rates,
    _Series,
)
from fedsim.targets.membership import membership_auc


def drawn(*series: _Series) -> ElementTree.Element:
    text = _draw_chart(series, across=_ChartAxis("x"), up=_ChartAxis("y"), description="of <b>")
    return ElementTree.fromstring(text)  # noqa: S314 - our own


def test_a_chart_is_described_and_labels_stay_text() -> None:
    root = drawn(_Series(color=0, points=[(1.0, 2.0)], label="<b>&"))
    assert root.get("role") == "img" and root.get("aria-label") == "of <b>"
    assert "<b>&" in [text.text for text in root.iter("text")]
    assert not [part for part in root.iter() if part.tag == "b"]


def test_larger_is_further_right_and_up_and_nothing_leaves_the_frame() -> None:
    points = [(0.0, -3.0), (50.0, 10.0), (100.0, 60.0)]
    series = [
        _Series(color=i, points=[p], bars=[((p[0] - 1, p[0] + 1), (p[1] - 9, p[1] + 9))])
        for i, p in enumerate(points)
    ]
    root = drawn(*series)
    width, height = map(float, (root.get("viewBox") or "").split()[2:])
    at = [(float(c.get("cx") or 0), float(c.get("cy") or 0)) for c in root.iter("circle")]
    assert at == sorted(at) and [y for _, y in at] == sorted((y for _, y in at), reverse=True)
    for line in root.iter("line"):
        assert 0 <= float(line.get("x1") or -1) <= width
        assert 0 <= float(line.get("y1") or -1) <= height


@pytest.mark.parametrize("shape", ["line", "steps"])
def test_a_line_passes_through_its_points(shape: str) -> None:
    root = drawn(_Series(color=9, points=[(0, 0), (1, 1), (2, 0)], shape=shape))  # type: ignore[arg-type]
    (path,) = root.iter("path")
    assert len(re.findall(r"[MLHV]", path.get("d") or "")) == (3 if shape == "line" else 5)
    assert path.get("stroke-dasharray"), "a color that comes again is dashed"


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3.2, 41), (0.001, 0.002), (-1e6, 1e7), (3, 3.1)]
)
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    ticks = _ChartAxis("x").ticks((low, high))
    assert 2 <= len(ticks) <= 8
    assert low <= ticks[0] and ticks[-1] <= high
    assert all(len(f"{tick:g}".strip("-")) <= 8 for tick in ticks)


def test_no_label_covers_another() -> None:
    labels = [(10.0, 50.0, str(i)) for i in range(12)] + [(400.0, 50.0, "far")]
    placed = _move_apart(labels)
    heights = sorted(y for x, y, _ in placed if x == 10.0)
    assert all(b - a >= 15 for a, b in pairwise(heights))
    assert ("far", 50.0) in [(text, y) for _, y, text in placed]


def area(rates: list[tuple[float, float]]) -> float:
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(rates))


def test_the_area_below_the_curve_is_the_score() -> None:
    stream = torch.Generator().manual_seed(0)
    members = torch.rand(60, generator=stream) < 0.4
    for levels in (1, 2, 5, 1000):
        scores = torch.randint(levels, (60,), generator=stream).double() + members.double()
        scores[:3] = torch.tensor([math.inf, -math.inf, math.inf])
        rates = _rates(scores, members)
        assert rates[0] == (0, 0) and rates[-1] == (1, 1)
        assert math.isclose(area(rates), membership_auc(scores, members))


def test_the_curve_counts_a_copied_trial_once(tmp_path: Path) -> None:
    rows: list[Any] = [
        SimpleNamespace(
            cell="c",
            ok=True,
            variant={},
            content=name,
            observation=f"none/{name}",
            attack=SimpleNamespace(label="a"),
        )
        for name in "xy"
    ]
    runs: list[Any] = []
    for folder, held in ((tmp_path / "run", rows), (tmp_path / "copy", rows[:1])):
        for place, row in enumerate(held):
            path = folder / "reconstructions" / "none" / "a" / f"{row.content}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            scores, members = torch.tensor([place, 0.5]), torch.tensor([True, False])
            save_file({"membership": scores, "members": members}, path)
        runs.append(SimpleNamespace(folder=folder, rows=held, setting=lambda *_: 0))
    gains = {"membership_auc": SimpleNamespace(mean=0.0)}
    line: Any = SimpleNamespace(gains=gains, defense="none", cell="c", limits={})
    ((once,), (twice,)) = (_list_accused([line], of, {"none": 0}) for of in (runs[:1], runs))
    assert once.points == twice.points
