"""Differences row by row: an attack less the guess, and an attack less itself on another update."""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.results.reading import Metrics, ResultRow
from fedsim.scoring import METRICS


def gains(rows: Sequence[ResultRow], name: str) -> list[float] | None:
    """Each row's value less its guess's; 0 of a row without an answer, which counts as the guess.

    So an update that was lost, of which there is no guess either, hides no other row's gain.
    None where nothing was guessed at all, and where an answer has no guess beside it or, of
    memberships, no value because everyone took part.
    """
    found = []
    for row in rows:
        own = _value(row.metrics, name) if row.ok else None
        guess = _value(row.baseline, name)
        if own is None:
            if row.ok and name == "membership_auc":
                return None
            found.append(0.0)
        elif guess is None:
            return None
        else:
            found.append(METRICS[name].gain(own, guess))
    return found if any(_value(row.baseline, name) is not None for row in rows) else None


def own_gains(rows: Sequence[ResultRow]) -> list[float] | None:
    """What of each row's gain in PSNR is due to its own update, dB: the lesser of both differences.

    The whole gain where there is no other update; None as in `gains`.
    """
    gained = gains(rows, "psnr")
    if gained is None:
        return None
    pairs = zip(gained, over_other(rows, "psnr"), strict=True)
    return [gain if over is None else min(gain, over) for gain, over in pairs]


def over_other(rows: Sequence[ResultRow], name: str) -> list[float | None]:
    """By how much more each row leaks of its own update than what was made of another one does.

    None of rows without that control, as failed ones are.
    """
    gain = METRICS[name].gain
    pairs = [
        (
            _value(row.metrics, name),
            _value(row.control.other_update if row.control else None, name),
        )
        for row in rows
    ]
    return [None if own is None or other is None else gain(own, other) for own, other in pairs]


def _value(metrics: Metrics | None, name: str) -> float | None:
    return metrics[name] if metrics else None
