"""Ranks the attacks on each defense within one view: a setting, an attacker, a batch size, a round.

Rows of two views are never ranked together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.report.level import Level, level_of
from fedsim.report.row import Comparison, LeaderboardRow
from fedsim.scoring import METRICS, Summary

View = tuple[Comparison, str, int, int]
"""(comparison, what is seen, batch size, round)."""

State = Literal["ranked", "blind", "failed"]
"""`blind`: the attack does no better than on another update. `failed`: no trial ended."""


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The attack that leaks most behind one defense of a view, by one metric."""

    row: int
    """Position of its line among the view's."""
    state: State
    """Other than `ranked` only if every attack on the defense is blind or failed."""
    compared: int
    """Number of attacks among which it was chosen."""
    gain: Summary | None
    """What it leaks more than the guess, with Bonferroni's interval for the choice; None where only
    means are compared."""
    excess: float | None
    """Mean of what it leaks more than the guess, in the metric's unit; None without a guess."""


def view_of(row: LeaderboardRow) -> View:
    """Returns the view that `row` is part of."""
    sight = "masked" if row.masked else row.vantage
    return (row.comparison, sight, row.batch_size, row.round)


def views(rows: Sequence[LeaderboardRow]) -> dict[View, list[int]]:
    """Maps each view to the positions of its rows."""
    members: dict[View, list[int]] = {}
    for position, row in enumerate(rows):
        members.setdefault(view_of(row), []).append(position)
    return members


def excess(row: LeaderboardRow, metric: str) -> float | None:
    """Returns by how much the mean of `metric` leaks more than the guess; None without a guess."""
    paired = row.above_guess(metric)
    if paired is not None:
        return paired.mean
    value, guess = row.metrics[metric], row.baseline[metric]
    guess = METRICS[metric].uninformed if guess is None else guess
    if value is None or guess is None:
        return None
    return METRICS[metric].gain(value.mean, guess)


def state_of(row: LeaderboardRow, metric: str) -> State:
    """Returns whether the attack of `row` works, judged by `metric`.

    A metric without a control of its own is judged by the one that ranks the attack.
    """
    if not row.n_ok:
        return "failed"
    blind = row.blind if row.above_other(metric) is None else row.is_blind_by(metric)
    return "blind" if blind else "ranked"


def levels_of(rows: Sequence[LeaderboardRow]) -> list[Level]:
    """Returns how badly each row of one view leaks, as chosen among those on its defense."""
    by_defense: dict[str, list[LeaderboardRow]] = {}
    for row in rows:
        by_defense.setdefault(row.defense, []).append(row)
    return [level_of(row, by_defense[row.defense]) for row in rows]


def worst_attacks(rows: Sequence[LeaderboardRow], metric: str) -> Mapping[str, Worst]:
    """Maps each defense of one view to its worst attack by `metric`.

    The undefended stack comes first, then the leakiest defense. Left out are defenses on which no
    attack yields the metric.
    """
    by_defense: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        if row.metrics[metric] is not None:
            by_defense.setdefault(row.defense, []).append(position)
    chosen = {name: _worst(rows, positions, metric) for name, positions in by_defense.items()}

    def rank(name: str) -> tuple[bool, tuple[bool, float], str]:
        worst = chosen[name]
        leak = _leak(rows[worst.row], metric)
        return (not rows[worst.row].undefended, (not leak[0], -leak[1]), name)

    return {name: chosen[name] for name in sorted(chosen, key=rank)}


def _worst(rows: Sequence[LeaderboardRow], positions: Sequence[int], metric: str) -> Worst:
    best = max(positions, key=lambda position: _leak(rows[position], metric))
    row = rows[best]
    compared = max(1, sum(rows[position].n_ok > 0 for position in positions))
    gain = row.above_guess(metric)
    return Worst(
        row=best,
        state=state_of(row, metric),
        compared=compared,
        gain=gain and gain.best_of(compared),
        excess=excess(row, metric),
    )


def _leak(row: LeaderboardRow, metric: str) -> tuple[bool, float]:
    """Returns the sort key of attacks: whether it works, then what it leaks more than the guess."""
    above = excess(row, metric)
    if above is None:
        value = row.metrics[metric]
        above = METRICS[metric].gain(value.mean, 0.0) if value else 0.0
    return state_of(row, metric) == "ranked", above
