"""How a canary is told from noise that is not what it is declared to be.

The sum of all that is seen along the canary decides best where noise is independent between
tensors, entries and rounds, of one deviation. Here the covariance of the release between these is
measured beside: a combination in which noise is less than declared, or cancels, tells more. It is
chosen on the first half of each world's trials; a bound counts the second half alone, and so fails
no more often for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.audit.bounds import LEAST_DRAWS, mu_bound
from fedsim.audit.contribution import along
from fedsim.types import Tensors

Array = NDArray[np.float64]

_PILOT = 32
"""Trials without the canary in which entries are compared."""
_COMPARED = 1024
"""Most entries that are compared with each other."""
_ROUNDS = 20
"""Most rounds that are looked at apart."""
_RIDGE = 1e-9
"""Of the mean variance: features whose noise is less are taken to have that much."""
_PER_FEATURE = 4
"""Trials for each feature that their covariance is measured from; with fewer, variances alone."""
_GAIN = 1.2
"""By what factor another look has to tell more, in standard deviations, to be taken for the sum."""
_ERROR = 0.05
"""How often the comparison of looks may err."""


class Looks:
    """What is looked at of a trial: sums along the canary, by tensor and round, and few entries."""

    def __init__(
        self,
        run: Callable[[int, int], list[Tensors]],
        towards: Sequence[Tensors],
        weights: Array,
    ) -> None:
        """Choose the entries from trials without the canary.

        Args:
            run: (world, trial) -> what is seen of each round; these trials are of world 2.
            towards: What the canary contributes to each round.
            weights: What each round counts where all noise is as declared.
        """
        self._towards, self._weights = towards, weights
        flat = _flat(towards[0])
        ends = np.cumsum([value.numel() for value in towards[0].values()])
        each = max(1, _COMPARED // len(ends))
        some = np.concatenate(
            [
                np.arange(max(0, end - size), end)[:each]
                for end, size in zip(ends, np.diff(ends, prepend=0), strict=True)
            ]
        )
        total, squares = np.zeros_like(flat), np.zeros_like(flat)
        compared = []
        for trial in range(_PILOT):
            seen = _flat(run(2, trial)[0])
            total += seen
            squares += seen**2
            compared.append(seen[some])
        variance = np.maximum(squares / _PILOT - (total / _PILOT) ** 2, 0.0)
        floor = _RIDGE * variance.mean() + np.finfo(float).tiny
        self._entry = int(np.argmax(flat**2 / (variance + floor)))
        with np.errstate(invalid="ignore", divide="ignore"):
            alike = np.atleast_2d(np.nan_to_num(np.corrcoef(np.array(compared), rowvar=False)))
        signal = flat[some] / np.sqrt(variance[some] + floor)
        left = signal[:, None] - np.sign(alike) * signal
        told = left**2 / (2 * (1 - np.abs(alike)) + _RIDGE)
        np.fill_diagonal(told, 0.0)
        self._pair = some[list(np.unravel_index(int(told.argmax()), told.shape))]

    def features(self, seen: Sequence[Tensors]) -> Array:
        """(F,): the weighted sum of all first, an entry and the difference of rounds second."""
        own = np.array(
            [
                [along({name: one[name]}, {name: toward[name]}) for name in toward]
                for one, toward in zip(seen, self._towards, strict=True)
            ]
        )
        first = _flat(seen[0])
        last = range(max(0, len(seen) - _ROUNDS), len(seen) - 1)
        crossed = [along(seen[t + 1], self._towards[t]) for t in last]
        by_round = own.sum(1)
        apart = by_round[-2] - crossed[-1] if crossed else 0.0
        by_tensor = self._weights @ own
        return np.array(
            [
                float(by_tensor.sum()),
                first[self._entry],
                apart,
                *by_tensor,
                *by_round[-_ROUNDS:],
                *crossed,
                *first[self._pair],
            ]
        )


def strongest(absent: Array, present: Array) -> tuple[Array, Array]:
    """(n,) and (m,) scores of what tells the canary best in the first half of each world's trials.

    Args:
        absent: (n, F) `Looks.features` without the canary.
        present: (m, F) with it.
    """
    halves = absent[: len(absent) // 2], present[: len(present) // 2]
    if min(map(len, halves)) < LEAST_DRAWS:
        return absent[:, 0], present[:, 0]
    count = absent.shape[1]
    singles = np.eye(count)[:3]
    looks = [*singles, -singles[1], -singles[2], _discriminant(*halves)]
    told = [mu_bound(*(half @ look for half in halves), error=_ERROR) for look in looks]
    best = int(np.argmax(told))
    look = looks[best if told[best] > _GAIN * told[0] else 0]
    return absent @ look, present @ look


def _discriminant(absent: Array, present: Array) -> Array:
    """(F,) Fisher's linear discriminant, of the first half of what is given."""
    some = [half[: len(half) // 2] for half in (absent, present)]
    shift = some[1].mean(0) - some[0].mean(0)
    scale = np.sqrt(np.mean([half.var(0) for half in some], axis=0))
    scale = np.maximum(scale, _RIDGE * (np.abs(shift) + scale.mean()) + np.finfo(float).tiny)
    spread = np.mean([np.cov(half / scale, rowvar=False) for half in some], axis=0)
    if _PER_FEATURE * len(shift) > min(map(len, some)):
        spread = np.diag(np.diag(spread))
    found: Array = np.linalg.solve(spread + _RIDGE * np.eye(len(shift)), shift / scale) / scale
    found /= np.abs(found).max()
    return found


def _flat(tensors: Tensors) -> Array:
    found: Array = torch.cat([value.flatten().double() for value in tensors.values()]).numpy()
    return found
