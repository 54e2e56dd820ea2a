"""A stranger's target: its own thresholds judge it, and every output has a sentence of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from answer_rows import FAILS, PROVEN, judged, trials

from fedsim.contracts import plugins, target
from fedsim.contracts.metric import Metric, ordered
from fedsim.report import messages as words
from fedsim.report import write_report
from fedsim.targets.images import Images, RankedImages
from fedsim.types import Reconstruction

SHARE_ERROR = Metric(
    name="share_error",
    compute=ordered(lambda claimed, truth: (claimed - truth).abs()),
    unit="share",
    larger_leaks=False,
    heading="share err",
    meaning="distance of the share of one class",
)


class ClassShare(target.Target):
    """The share of one class among all that a client holds."""

    part: ClassVar[str] = "class_share"
    noun: ClassVar[str] = "shares of one class"
    singular: ClassVar[str] = "share of one class"
    metrics: ClassVar[tuple[Metric, ...]] = (SHARE_ERROR,)
    leaks: ClassVar[float] = 0.1
    works: ClassVar[float | None] = 0.2


Install = Callable[[type[target.Target]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Adds a target to those that are installed."""
    known = plugins.list_installed

    def add(cls: type[target.Target]) -> None:
        entry = plugins.Installed(
            group=target.GROUP,
            name=cls.part,
            package="stranger",
            version="1",
            cls=cls,
            parameters=(),
            error=None,
        )
        monkeypatch.setattr(
            plugins,
            "list_installed",
            lambda group: [*known(group), *([entry] if group == target.GROUP else [])],
        )
        for cached in (target.targets, target._metrics):
            cached.cache_clear()

    yield add
    monkeypatch.undo()
    for cached in (target.targets, target._metrics):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("error", "status", "finding"), [(0.05, "passed", "class_share"), (0.45, "failed", "no answer")]
)
def test_a_strangers_target_is_judged_by_its_own_thresholds(
    error: float, status: str, finding: str, install: Install, tmp_path: Path
) -> None:
    install(ClassShare)

    def of_shares(defense: str, error: float) -> list[dict[str, object]]:
        rows = trials(FAILS, defense=defense, attack="share_inference", privacy=PROVEN)
        return [
            row
            | {"metrics": {"share_error": error + i / 1000}}
            | {"baseline": {"name": "half", "share_error": 0.5}}
            | {"control": {"of": "client", "other_update": {"share_error": 0.48}}}
            for i, row in enumerate(rows)
        ]

    lines = [*of_shares("none", error), *of_shares("dp", 0.47)]
    each = judged(tmp_path, lines)
    assert (each.control.status, each.control.metric) == (status, "share_error")
    plain, defended = each.verdicts
    assert plain.finding == finding
    assert "share err" in words.describe_control(each.control)
    page = write_report(tmp_path).read_text()
    if status == "passed":
        assert (plain.reliance, defended.finding) == ("do not rely", "unknown")
        assert "gets shares of one class" in words.brief(plain)
        assert "gets shares of one class" in page
    assert "distance of the share of one class" in page.lower()


def test_a_metric_of_images_ranks_first_and_leaves_the_main_target(install: Install) -> None:
    class Shares(RankedImages):
        part: ClassVar[str] = "a_part_before_images"
        metrics: ClassVar[tuple[Metric, ...]] = (SHARE_ERROR,)
        leaks: ClassVar[float] = 0.1

    install(Shares)
    first = next(iter(target.targets().values()))
    assert isinstance(first, Shares) and target.main_target("update").part == "images"
    found = Reconstruction(images=torch.rand(1, 3, 2, 2), loss=0.0, iterations=1)
    assert first.answer_of(found) is found.images


def test_two_main_targets_of_one_payload_are_refused(install: Install) -> None:
    """Otherwise the name decides which one judges every run."""

    class Rival(Images):
        part: ClassVar[str] = "a_part_before_images"

    install(Rival)
    with pytest.raises(plugins.PluginError, match=r"images are both .* state `payloads = \(\)`"):
        target.targets()
