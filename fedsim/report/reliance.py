"""Says whether a defense may be relied on, and why not: guarantees, and what was tried."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from fedsim.report.figures import NO_DIFFERENTIAL_PRIVACY, format_epsilon, format_signed
from fedsim.report.finding import LEAKS, Finding
from fedsim.report.level import best_of_several, leaks_labels, level_of, tells_members
from fedsim.report.row import REQUIRED_GAIN, LeaderboardRow
from fedsim.report.sentences import WEAK_EPSILON, unstated_terms
from fedsim.report.verdict import Verdict
from fedsim.scoring import LEAST, Summary
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
    if finding == "some trials":
        return "not shown", "what it gets is more than guessing gives"
    if weakness := _weakness(row):
        return "not shown", f"only these attacks failed here, and {weakness}"
    if doubt := _untested(rows, undefended) or _scatter(rows) or _model_problem(rows):
        return "not shown", doubt
    return "rely", "for what its ε promises, and no more"


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
    working = [row for row in undefended if works(row, undefended)]
    if not working:
        return "no attack works for certain without a defense"
    summed = any(row.vantage == "aggregate" for row in rows)
    tried = {attempt(row, summed) for row in rows if not row.masked}
    for row in working:
        if attempt(row, summed) not in tried:
            return (
                f"{row.attack} at batch size {row.batch_size} in round {row.round} works without "
                "a defense and was not tried here in the same way"
            )
    return None


def works(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether something leaks for certain to the attack of `row`, chosen among `rows`."""
    leaks = level_of(row, rows) in ("leak", "partial", "features")
    return leaks or leaks_labels(row, rows) or tells_members(row, rows)


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


def _model_problem(rows: Sequence[LeaderboardRow]) -> str | None:
    """Returns why the model's updates may hold nothing; None if they are of one that learns."""
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
    return None
