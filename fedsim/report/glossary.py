"""The terms of the leaderboard and the report, each explained once: page, tips and docs use them.

A page that shows a figure explains it from here. Terms of metrics come with the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsim.report.figures import read_texts
from fedsim.report.judge import LARGEST_DELTA, WEAK_EPSILON
from fedsim.report.row import LeaderboardRow
from fedsim.scoring import LEAST, METRICS, Term
from fedsim.targets.images import (
    EXPOSED_IMAGE,
    LIKENESS_GAIN,
    RECOGNIZABLE_HAARPSI,
    RECOGNIZABLE_PSNR,
    RECOGNIZABLE_SSIM,
    Images,
)

_VALUES = {
    "EXPOSED_GAIN": Images.exposes,
    "EXPOSED_IMAGE": EXPOSED_IMAGE,
    "LARGEST_DELTA": LARGEST_DELTA,
    "LEAST": LEAST,
    "LIKENESS_GAIN": LIKENESS_GAIN,
    "RECOGNIZABLE_PSNR": RECOGNIZABLE_PSNR,
    "RECOGNIZABLE_HAARPSI": RECOGNIZABLE_HAARPSI,
    "RECOGNIZABLE_SSIM": RECOGNIZABLE_SSIM,
    "REQUIRED_GAIN": Images.leaks,
    "WEAK_EPSILON": WEAK_EPSILON,
}
"""Thresholds that the terms name."""


def terms() -> Mapping[str, Term]:
    """Returns the terms by key, in the order of a page."""
    stated = [
        Term(key=each["key"], name=each["name"], meaning=each["meaning"].format(**_VALUES))
        for each in read_texts()["glossary"]
    ]
    of_metrics = [metric.term for metric in METRICS.values() if metric.heading]
    return {term.key: term for term in (*stated, *of_metrics)}


def terms_of(
    rows: Sequence[LeaderboardRow], *, invalid: bool = False, unscored: bool = False
) -> list[Term]:
    """Returns the terms that a page about `rows` uses, in the order of the table.

    `invalid` says that a comparison has no answer, `unscored` that truths are with the clients.
    """
    used = {
        "audit": any(row.audited_epsilon is not None for row in rows),
        "server": any(row.server != "honest" for row in rows),
        "masked": any(row.masked for row in rows),
        "other": any("psnr" in row.others for row in rows),
        "invalid": invalid,
        "unscored": unscored,
        "matching": any(row.main.itemwise for row in rows),
    }
    for name, metric in METRICS.items():
        key, measured = metric.term.key, any(row.metrics.get(name) for row in rows)
        used[key] = used.get(key, False) or measured
    return [term for key, term in terms().items() if used.get(key, True)]


def markdown() -> str:
    """Returns the glossary as the table of `docs/glossary.md`."""
    lines = ["| term | meaning |", "| --- | --- |"]
    lines += [f"| **{term.name}** | {term.meaning} |" for term in terms().values()]
    return "\n".join(lines) + "\n"
