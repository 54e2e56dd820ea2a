"""Differences row by row: an attack less the guess, and an attack less itself on another update."""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.results.lines import Metrics, ResultRow
from fedsim.scoring import METRICS


def gains(rows: Sequence[ResultRow], name: str) -> list[float] | None:
    """Returns each row's value less its guess's; 0 for a row without an answer.

    So an update that was lost, of which there is no guess either, hides no other row's gain. None
    if nothing was guessed at all, if an answer has no guess beside it, or if membership has no
    value because everyone took part.
    """
    differences = []
    for row in rows:
        score = value_of(row.metrics, name) if row.ok else None
        guess = value_of(row.baseline, name)
        if score is None:
            if row.ok and name == "membership_auc":
                return None
            differences.append(0.0)
        elif guess is None:
            return None
        else:
            differences.append(METRICS[name].gain(score, guess))
    return differences if any(value_of(row.baseline, name) is not None for row in rows) else None


def own_gains(rows: Sequence[ResultRow]) -> list[float] | None:
    """Returns the part of each row's PSNR gain that its own update explains, dB.

    That is the lesser of the gains over the guess and over another update; the whole gain where
    there is no other update. None as in `gains`.
    """
    gained = gains(rows, "psnr")
    if gained is None:
        return None
    pairs = zip(gained, over_other(rows, "psnr"), strict=True)
    return [gain if over is None else min(gain, over) for gain, over in pairs]


def over_other(rows: Sequence[ResultRow], name: str) -> list[float | None]:
    """Returns by how much more each row leaks of its own update than the attack made of another.

    None for rows without that control, such as failed ones.
    """
    gain = METRICS[name].gain
    pairs = [(value_of(row.metrics, name), value_of(row.other_update, name)) for row in rows]
    return [None if own is None or other is None else gain(own, other) for own, other in pairs]


def value_of(metrics: Metrics | None, name: str) -> float | None:
    """Returns the value of metric `name`; None if there are no metrics or it does not apply."""
    return metrics[name] if metrics else None
