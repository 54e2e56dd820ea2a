"""A stranger's target: its own thresholds judge it, and every output has a sentence of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from answer_rows import FAILS, PROVEN, judged, trials

from fedsim.contracts import plugins, target
from fedsim.contracts.metric import Metric, ordered
from fedsim.report import messages as words
from fedsim.report import write_report

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


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = plugins.list_installed

    def installed(group: str) -> list[plugins.Installed]:
        entry = plugins.Installed(
            group=group,
            name="class_share",
            package="stranger",
            version="1",
            cls=ClassShare,
            parameters=(),
            error=None,
        )
        return [*known(group), *([entry] if group == target.GROUP else [])]

    monkeypatch.setattr(plugins, "list_installed", installed)
    for cached in (target.targets, target._metrics):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (target.targets, target._metrics):
        cached.cache_clear()


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("error", "status", "finding"), [(0.05, "passed", "class_share"), (0.45, "failed", "no answer")]
)
def test_a_strangers_target_is_judged_by_its_own_thresholds(
    error: float, status: str, finding: str, tmp_path: Path
) -> None:
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
