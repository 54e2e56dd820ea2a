"""Differences row by row: an attack less the guess, and an attack less itself on another update."""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.results.lines import Metrics, ResultRow
from fedsim.scoring import METRICS


def gains(rows: Sequence[ResultRow], name: str) -> list[float] | None:
    """Returns each row's value of the metric `name` less its guess's; 0 without an answer.

    So an update that was lost, of which there is no guess either, hides no other row's gain. None
    if nothing was guessed at all, if an answer has no guess beside it, or if a metric that needs no
    guess has no value, as membership where everyone took part.
    """
    differences = []
    for row in rows:
        score = value_of(row.metrics, name) if row.ok else None
        guess = value_of(row.baseline, name)
        if score is None:
            if row.ok and METRICS[name].uninformed is not None:
                return None
            differences.append(0.0)
        elif guess is None:
            return None
        else:
            differences.append(METRICS[name].gain(score, guess))
    return differences if any(value_of(row.baseline, name) is not None for row in rows) else None


def own_gains(rows: Sequence[ResultRow], name: str = "psnr") -> list[float | None] | None:
    """Returns the part of each row's gain in metric `name` that its own update explains.

    That is the lesser of the gains over the guess and over another update. Without any other
    update it is the whole gain. Where only some rows have one, it is None of an answer without: a
    trial that nothing controls does not count for those that are. None as in `gains`.
    """
    gained = gains(rows, name)
    if gained is None:
        return None
    overs = over_other(rows, name)
    partial = any(over is not None for over in overs)
    pairs = zip(rows, gained, overs, strict=True)
    return [
        min(gain, over) if over is not None else None if partial and row.ok else gain
        for row, gain, over in pairs
    ]


def due_gains(rows: Sequence[ResultRow], name: str = "psnr") -> list[float | None] | None:
    """Returns the part of each row's gain that counts: its own, where a control can tell that.

    `name` is the metric's.

    Another batch of the same client cannot: where one is the control of any row, all of the gain
    counts of each. None as in `gains`.
    """
    if any(row.control and row.control.of == "batch" and row.other_update for row in rows):
        return None if (whole := gains(rows, name)) is None else [*whole]
    return own_gains(rows, name)


def image_gains(row: ResultRow) -> list[tuple[float, float]]:
    """Returns (PSNR, gain in dB) of each image of a trial that has an answer and a control.

    The gain is the lesser of those over the image's own guess and over the same image as drawn from
    another update. An image's guess and control are of the same trial; of rows that do not say
    them per image, the means of the trial less `WITHIN` stand for both.
    """
    values = (row.per_image or {}).get("psnr", [])
    guess, other = value_of(row.baseline, "psnr"), value_of(row.other_update, "psnr")
    own = value_of(row.metrics, "psnr")
    if not row.ok or guess is None or other is None or own is None:
        return []
    guesses = row.baseline.per_image.get("psnr", []) if row.baseline else []
    others = row.control.per_image.get("psnr", []) if row.control else []
    if len(values) == len(guesses) == len(others):
        triples = zip(values, guesses, others, strict=True)
        return [(v, min(v - g, v - o)) for v, g, o in triples if g is not None and o is not None]
    # Means say nothing of one image unless its trial as a whole is better than both.
    if min(own - guess, own - other) <= 0:
        return []
    return [(value, value - guess - WITHIN) for value in values]


WITHIN = 14.0
"""Where no guess is known of an image by itself, its gain over the trial's mean guess counts for so
many dB less: guesses of one image exceed their own mean by that at most on the bundled data."""


def over_other(rows: Sequence[ResultRow], name: str) -> list[float | None]:
    """Returns by how much more each row leaks of its own update than the attack made of another.

    `name` is the metric's.

    It is None for rows without that control, such as failed ones.
    """
    gain = METRICS[name].gain
    pairs = [(value_of(row.metrics, name), value_of(row.other_update, name)) for row in rows]
    return [None if own is None or other is None else gain(own, other) for own, other in pairs]


def value_of(metrics: Metrics | None, name: str) -> float | None:
    """Returns the value of metric `name`; None if there are no metrics or it does not apply."""
    return metrics[name] if metrics else None
