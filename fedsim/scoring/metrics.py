"""The table of metrics: what each is called, computed by, measured in, and compared with.

Scores, rows, leaderboard and report read this table. To add a metric, write a function in the
module of what it compares (`image.py`, `features.py`, `labels.py`, `rows.py`) and a line here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedsim.scoring import features, image, labels, rows
from fedsim.scoring.outcome import Unavailable
from fedsim.scoring.perceptual import LpipsMetric, perceptual_distance

Compared = Literal["images", "features", "labels", "rows", "classes", "membership"]
"""What a metric compares with the truth; `classes` are the last entries of a row."""

Value = Tensor | float | Unavailable
"""One value for each truth (N,), one for all of them, or why there is none."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A part of a reconstruction beside the same part of the truth."""

    claimed: Tensor
    """In the order of the truth, where there is one; (N, ...) of all but `labels`."""
    truth: Tensor
    """(N, ...)"""
    unordered: Tensor | None = None
    """(M, ...) as the attack returned it; None if that had the order of the truth."""
    lpips: LpipsMetric | Unavailable | None = None
    """How images are compared perceptually; None if they are not."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term, and what it means in plain sentences."""

    key: str
    """Identifies it in a page: lower-case letters and hyphens."""
    name: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric, as everything that computes, compares or shows its values has to know it."""

    name: str
    """Name of its field in results.jsonl."""
    functions: Mapping[Compared, Callable[[Pair], Value]]
    """The function that computes it, for each part that it compares; empty if the attack itself
    states the value."""
    unit: Literal["dB", "degrees", "range", "share", "relative", "none"]
    """`range`: pixels or entries scaled to [0, 1]. `relative`: in units of the truth's length."""
    larger_leaks: bool
    """Whether a larger value is a larger leak."""
    uninformed: float | None = None
    """Value of an answer without any knowledge, for all data: features of zero, a coin. None if it
    depends on the data; then the guess is scored."""
    heading: str | None = None
    """Heading of its column in a leaderboard; None if only JSON and CSV show it."""
    meaning: str = ""
    """Explains the column to people."""
    described: Term | None = None
    """Entry of the glossary, if it says more than `heading` and `meaning` do."""
    shown_as: Literal["mean", "interval", "percent"] = "mean"
    digits: int = 2
    """Number of decimals."""
    narrow: Literal["kept", "late", "early"] = "early"
    """When a table that is too wide leaves it out: never, late, or early."""

    @property
    def term(self) -> Term:
        """Entry of the glossary that explains the metric's column."""
        if self.described:
            return self.described
        key = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        meaning = self.meaning[:1].upper() + self.meaning[1:]
        return Term(key=key, name=self.heading or self.name, meaning=f"{meaning}.")

    def gain(self, value: float, over: float) -> float:
        """Returns by how much more `value` leaks than `over`; negative if it leaks less."""
        return value - over if self.larger_leaks else over - value


def _ordered(function: Callable[[Tensor, Tensor], Value]) -> Callable[[Pair], Value]:
    return lambda pair: function(pair.claimed, pair.truth)


def _spanned(function: Callable[[Tensor, Tensor], Value]) -> Callable[[Pair], Value]:
    """Compares all vectors that the attack returned, whatever they were matched to."""
    return lambda pair: function(
        pair.claimed if pair.unordered is None else pair.unordered, pair.truth
    )


def _as_pixels(function: Callable[[Tensor, Tensor], Value]) -> Callable[[Pair], Value]:
    """Scales entries of rows from [-1, 1] to [0, 1], so that a decibel means the same."""
    return lambda pair: function((pair.claimed + 1) / 2, (pair.truth + 1) / 2)


_LABELS = Term(
    key="labels",
    name="labels",
    meaning="Share of labels recovered: on the matched image, or as a multiset where an attack "
    "recovers labels alone. The guess names the most frequent one.",
)

_FEATURES = Term(
    key="features",
    name="feat, span",
    meaning="Recovered inputs of the model’s head. feat: their mean cosine with the true ones. "
    "span: share of the true features outside the span of the recovered ones; 0 is exact.",
)

_MEMBERSHIP = Term(
    key="membership",
    name="AUC, TPR",
    meaning="How well members are told from others. AUC: the chance that a member is accused "
    "before another, 0.5 for a coin. TPR: share of members accused at "
    f"{rows.FALSE_POSITIVES:.0%} false accusations.",
)

_ROWS = Term(
    key="rows",
    name="row err, recovered",
    meaning="Of tables: squared error over squared length of a row, and the share of rows with "
    "every entry near the true one. The guess is the mean of the other rows.",
)

_TABLE = (
    Metric(
        name="rmse",
        functions={"images": _ordered(image.rmse), "rows": _as_pixels(image.rmse)},
        unit="range",
        larger_leaks=False,
    ),
    Metric(
        name="psnr",
        functions={"images": _ordered(image.psnr), "rows": _as_pixels(image.psnr)},
        unit="dB",
        larger_leaks=True,
        heading="PSNR dB",
        meaning="likeness of pixels, or of entries on their declared range",
        described=Term(
            key="psnr",
            name="PSNR",
            meaning="Likeness of pixels in dB, of each image on its own, at most 60. Higher is "
            "more leaked. Near 10 it is a gray patch; from about 20 on most people know the "
            "picture.",
        ),
        shown_as="interval",
        digits=1,
        narrow="kept",
    ),
    Metric(
        name="ssim",
        functions={"images": _ordered(image.ssim)},
        unit="none",
        larger_leaks=True,
        heading="SSIM",
        meaning="likeness of structure, 1 is identical",
        described=Term(
            key="ssim",
            name="SSIM",
            meaning="Likeness of structure such as edges. 1 is identical, 0 is unrelated.",
        ),
    ),
    Metric(
        name="lpips",
        functions={
            "images": lambda pair: perceptual_distance(pair.claimed, pair.truth, pair.lpips)
        },
        unit="none",
        larger_leaks=False,
        heading="LPIPS",
        meaning="perceptual distance, 0 is identical",
        described=Term(
            key="lpips",
            name="LPIPS",
            meaning="Distance of two images as a trained network perceives it. 0 is identical. It "
            "needs weights that may not be there.",
        ),
    ),
    Metric(
        name="feature_error",
        functions={"features": _ordered(features.feature_error)},
        unit="relative",
        larger_leaks=False,
        uninformed=1.0,
    ),
    Metric(
        name="feature_cosine",
        functions={"features": _ordered(features.feature_cosine)},
        unit="none",
        larger_leaks=True,
        uninformed=0.0,
        heading="feat",
        meaning="mean cosine of the features",
        described=_FEATURES,
        narrow="late",
    ),
    Metric(
        name="subspace_error",
        functions={"features": _spanned(features.subspace_error)},
        unit="share",
        larger_leaks=False,
        uninformed=1.0,
        heading="span",
        meaning="share of the true features outside the span of the recovered ones",
        described=_FEATURES,
        digits=3,
        narrow="late",
    ),
    Metric(
        name="principal_angle",
        functions={"features": _spanned(features.principal_angles)},
        unit="degrees",
        larger_leaks=False,
        uninformed=90.0,
    ),
    Metric(
        name="label_accuracy",
        functions={
            "labels": _ordered(labels.label_overlap),
            "classes": _ordered(rows.right_class),
        },
        unit="share",
        larger_leaks=True,
        heading="label",
        meaning="share of labels recovered, whatever image they came with",
        described=_LABELS,
        shown_as="percent",
        narrow="late",
    ),
    Metric(
        name="row_error",
        functions={"rows": _ordered(rows.row_error)},
        unit="relative",
        larger_leaks=False,
        heading="row err",
        meaning="squared error over squared length",
        described=_ROWS,
        digits=3,
        narrow="late",
    ),
    Metric(
        name="row_cosine",
        functions={"rows": _ordered(rows.row_cosine)},
        unit="none",
        larger_leaks=True,
    ),
    Metric(
        name="rows_recovered",
        functions={"rows": _ordered(rows.recovered)},
        unit="share",
        larger_leaks=True,
        heading="recovered",
        meaning=f"rows with every entry within {rows.TOLERANCE:.0%} of its range",
        described=_ROWS,
        shown_as="percent",
    ),
    Metric(
        name="membership_auc",
        functions={"membership": _ordered(rows.membership_auc)},
        unit="share",
        larger_leaks=True,
        uninformed=0.5,
        heading="AUC",
        meaning="of membership: the chance that a member is accused before another",
        described=_MEMBERSHIP,
        shown_as="interval",
        narrow="kept",
    ),
    Metric(
        name="membership_tpr",
        functions={"membership": _ordered(rows.membership_tpr)},
        unit="share",
        larger_leaks=True,
        uninformed=rows.FALSE_POSITIVES,
        heading="TPR",
        meaning=f"of membership, at {rows.FALSE_POSITIVES:.0%} false positives",
        described=_MEMBERSHIP,
        shown_as="percent",
    ),
    Metric(name="attack_loss", functions={}, unit="none", larger_leaks=False),
)

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _TABLE}
"""The metrics by name, in the order of a row's fields."""

COMPARABLE: tuple[str, ...] = tuple(metric.name for metric in _TABLE if metric.functions)
"""Names of the metrics that mean the same for every attack."""


def compare(what: Compared, pair: Pair) -> dict[str, Value]:
    """Returns the value of each metric of `what`, by name."""
    return {
        metric.name: metric.functions[what](pair) for metric in _TABLE if what in metric.functions
    }
