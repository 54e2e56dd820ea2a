"""Says whether a defense may be relied on, and why not: guarantees, and what was tried."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fedsim.report.figures import NO_DIFFERENTIAL_PRIVACY, format_epsilon, format_signed
from fedsim.report.finding import LEAKS, Finding
from fedsim.report.level import (
    best_of_several,
    leaks_features,
    leaks_labels,
    level_of,
    tells_members,
)
from fedsim.report.row import REQUIRED_GAIN, LeaderboardRow
from fedsim.report.sentences import WEAK_EPSILON, unstated_terms
from fedsim.report.verdict import Verdict
from fedsim.scoring import LEAST, Summary, chance_of
from fedsim.words import number_of

LARGEST_DELTA = 1e-3
"""Above this δ a guarantee may fail for one person in a thousand, and nothing rests on it."""

Reliance = Literal["rely", "do not rely", "not shown"]


def reliance_of(
    verdict: Verdict,
    finding: Finding,
    rows: Sequence[LeaderboardRow],
    undefended: Sequence[LeaderboardRow],
    *,
    refuted: bool,
) -> tuple[Reliance, str]:
    """Returns the verdict and why; only a guarantee that attacks do not contradict is relied on.

    Args:
        verdict: on the defense.
        finding: what its attackers get.
        rows: of the defense.
        undefended: rows of the same comparison without a defense.
        refuted: whether an audit of a run found more than its training claims.
    """
    row = verdict.strongest
    if finding in LEAKS:
        return "do not rely", "the attack works"
    if any(_is_refuted(line) for line in rows):
        return "do not rely", "the audit refutes its ε"
    if refuted:
        return "do not rely", "the audit refutes the ε that its training claims"
    if row.undefended:
        return "not shown", "there is no defense to rely on"
    if finding == "failed":
        return "not shown", "no attack was measured"
    if finding == "unknown":
        return "not shown", f"no attack on {row.subject} was measured"
    if finding == "undecided":
        return "not shown", f"{_uncompared(row)}, so that nothing tells what it read off the update"
    if finding == "some trials":
        return "not shown", "what it gets is more than guessing gives"
    if weakness := _weakness(row):
        return "not shown", f"only these attacks failed here, and {weakness}"
    doubts = (_untested(rows, undefended), _scatter(rows), _model_problem(rows, undefended))
    if doubt := next(filter(None, doubts), None):
        return "not shown", doubt
    return "rely", "for what its ε promises, and no more"


def _uncompared(row: LeaderboardRow) -> str:
    return row.no_control or f"{row.other} gives as much"


def _is_refuted(row: LeaderboardRow) -> bool:
    audited, epsilon = row.audited_epsilon, row.epsilon
    return audited is not None and epsilon is not None and audited > epsilon


def _weakness(row: LeaderboardRow) -> str | None:
    """Returns why the guarantee of `row` bears no reliance; None if it does."""
    epsilon, delta = row.epsilon, row.delta
    if epsilon is None or math.isinf(epsilon):
        return "no guarantee says that others will"
    if unstated_terms(row):
        return f"its guarantee does not state {' and '.join(unstated_terms(row))}"
    if row.relation in NO_DIFFERENTIAL_PRIVACY:
        return "its guarantee is no differential privacy"
    if epsilon >= WEAK_EPSILON:
        return f"an ε of {format_epsilon(epsilon)} promises next to nothing"
    if delta is not None and delta > LARGEST_DELTA:
        return f"its δ is above {LARGEST_DELTA:g}"
    return None


def _untested(rows: Sequence[LeaderboardRow], undefended: Sequence[LeaderboardRow]) -> str | None:
    """Returns which attack that works was not carried out on the defense; None if all were."""
    failed, total = sum(row.n - row.n_ok for row in rows), sum(row.n for row in rows)
    if failed:
        runs = number_of(total, "attack run")
        return f"{failed} of {runs} failed, which is no protection"
    sound = [row for row in undefended if not row.diverged]
    working = {
        target: [row for row in sound if leaks(row, undefended)] for target, leaks in _LEAKS.items()
    }
    if not any(working.values()):
        return "no attack works for certain without a defense"
    summed = any(row.vantage == "aggregate" for row in rows)
    tried = {attempt(row, summed): row for row in rows if not row.masked}
    for target, attacks in working.items():
        for row in attacks:
            where = f"{row.attack} at batch size {row.batch_size} in round {row.round}"
            same = tried.get(attempt(row, summed))
            if same is None:
                return f"{where} works without a defense and was not tried here in the same way"
            if not _is_told_apart(row, same, target, len(rows)):
                return (
                    f"{where} does on {target} what it does without a defense, as far as so few "
                    "trials tell"
                )
    return None


_LEAKS: Mapping[str, Callable[[LeaderboardRow, Sequence[LeaderboardRow]], bool]] = {
    "pictures": lambda row, rows: level_of(row, rows) in ("leak", "partial"),
    "features": leaks_features,
    "labels": leaks_labels,
    "membership": tells_members,
}
"""What an attack may work on -> whether it does, for certain."""

_CHANCE = 0.05
"""A difference between two counts of trials is one if chance makes it less often."""


def _is_told_apart(
    plain: LeaderboardRow, defended: LeaderboardRow, target: str, compared: int
) -> bool:
    """Whether an attack certainly does less behind a defense than it does without.

    Args:
        plain: the attack without a defense, where it works.
        defended: the same attack behind it.
        target: what it works on.
        compared: number of attacks behind the defense, for which its intervals allow.
    """
    measures: dict[str, Callable[[LeaderboardRow], Summary | None]] = {
        "pictures": lambda row: row.due,
        "labels": lambda row: row.label_gain,
        "membership": lambda row: row.membership_gain,
    }
    if target == "pictures" and plain.leaking and defended.leaking:
        counts = [(s.count, s.n - s.count) for s in (plain.leaking, defended.leaking)]
        if chance_of(*counts[0], *counts[1]) <= _CHANCE:
            return True
    if target == "features":
        before, after = plain.metrics["subspace_error"], defended.metrics["subspace_error"]
        if before is None or after is None:  # a certificate says so by itself
            return True
        return _end(before, low=False) < _end(after.best_of(compared), low=True)
    before, after = measures[target](plain), measures[target](defended)
    if before is None or after is None:
        return False
    return _end(after.best_of(compared), low=False) < _end(before, low=True)


def _end(summary: Summary, *, low: bool) -> float:
    """Returns an end of the interval; without one the extreme of the trials."""
    if low:
        return summary.min if summary.low is None else summary.low
    return summary.max if summary.high is None else summary.high


def works(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether something leaks for certain to the attack of `row`, chosen among `rows`."""
    return any(leaks(row, rows) for leaks in _LEAKS.values())


def attempt(row: LeaderboardRow, summed: bool) -> tuple[Any, ...]:
    """Identifies what was tried; a sum is of more images than the updates in it."""
    attack = json.dumps(json.loads(row.cell)["attack"], sort_keys=True)
    size = None if summed else row.batch_size
    return attack, row.round, size


def _scatter(rows: Sequence[LeaderboardRow]) -> str | None:
    """Returns why the intervals allow for a leak; None if all end below one."""
    tried = [row for row in rows if row.gain and not row.masked]
    highs = []
    for row in tried:
        gain = best_of_several(row, tried, _due)
        if gain is None or gain.n < LEAST:
            return "too few trials for an interval"
        if gain.high is None:
            return "all trials gained the same, which says nothing of what is rare"
        highs.append(gain.high)
    if not highs:
        return "too few trials for an interval"
    if max(highs) >= REQUIRED_GAIN:
        reach = f"{format_signed(max(highs))} dB"
        return f"the interval reaches {reach}, so more trials are needed"
    return None


def _due(row: LeaderboardRow) -> Summary | None:
    """The gain; of an attack that does as well on another update, the part due to this one."""
    return row.own_gain if row.blind else row.gain


LEAST_SKILL = 0.5
"""A model that reaches less than this share of what it learns without a defense, above chance, has
updates that may hold little, and costs more than it is worth."""


def _model_problem(
    rows: Sequence[LeaderboardRow], undefended: Sequence[LeaderboardRow]
) -> str | None:
    """Returns why the model's updates may hold nothing; None if they are of one that learns."""
    usual = max((row.accuracy.skill for row in undefended if row.accuracy), default=0.0)
    for row in rows:
        if row.diverged:
            return (
                f"local training diverges in {row.diverged} of "
                f"{number_of(row.n, 'recording')}, so that its updates say little"
            )
        if row.learning_problem:
            return "the model learned nothing, so that its updates may hold nothing"
        if row.accuracy is None and row.subject == "images":
            return "whether the model learned was not measured"
        if row.accuracy and row.accuracy.skill < LEAST_SKILL * usual:
            return (
                f"the model learns little behind it ({row.accuracy.share:.0%} of its test set, "
                f"chance {row.accuracy.chance:.0%})"
            )
    return None
