"""The positive control: an attack that fails without a defense says nothing about defenses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedsim.report.figures import format_number
from fedsim.report.row import REQUIRED_GAIN, Comparison, LeaderboardRow
from fedsim.scoring import Summary
from fedsim.words import number_of

REQUIRED_SPAN = 0.5
"""Where only features are attacked, the control passes at this share of the guess's span error."""
REQUIRED_AUC = 0.75
"""Where only membership is attacked, the control passes from this area under the curve."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """Says whether the attacks work on a comparison's undefended stack."""

    comparison: Comparison
    status: Literal["passed", "failed", "broken", "absent"]
    """`broken`: an attack crashed or refused, and no other shows what attacks can do."""
    reason: str
    ended: bool = True
    """Whether the runs have ended: until then nothing follows, whatever the status so far."""

    @property
    def mark(self) -> str:
        """The word over a table from which nothing follows; empty if it does."""
        if not self.ended:
            return "UNFINISHED"
        return "" if self.status == "passed" else "INVALID"


def positive_controls(rows: Sequence[LeaderboardRow]) -> list[Control]:
    """Returns one control per comparison among `rows`."""
    controls = []
    for key in dict.fromkeys(row.comparison for row in rows):
        members = [row for row in rows if row.comparison == key]
        control = _with_failures(_control(key, members), members)
        if not all(row.ended for row in members):
            reason = control.reason if control.status == "passed" else NOT_ENDED
            control = replace(control, ended=False, reason=reason)
        controls.append(control)
    return controls


def _with_failures(control: Control, rows: Sequence[LeaderboardRow]) -> Control:
    """Names attacks that did not run: a crash, or a refusal, is no attack that does not work."""
    undefended = [row for row in rows if row.undefended]
    failures = describe_failures(undefended)
    if control.status != "failed" or not failures:
        return control
    told = "; ".join(failures)
    size = min(row.batch_size for row in undefended)
    shown = [row for row in undefended if row.batch_size == size and row.n_ok]
    if any(row.gain or row.metrics["subspace_error"] or row.membership_gain for row in shown):
        return replace(control, reason=f"{control.reason}; besides, {told}")
    return replace(
        control,
        status="broken",
        reason=f"an attack on the undefended stack crashed or refused, and no other one on "
        f"{rows[0].subject} ran, so that nothing shows what attacks can do: {told}",
    )


def describe_failures(rows: Sequence[LeaderboardRow]) -> list[str]:
    """Words which attacks failed, how often, on which stacks and why: one line a reason."""
    failed: dict[tuple[str, str], list[LeaderboardRow]] = {}
    for row in rows:
        for reason in row.failures:
            failed.setdefault((row.attack, reason), []).append(row)
    return [
        f"{attack} failed in {sum(row.failures[reason] for row in members)} of "
        f"{number_of(sum(row.n for row in members), 'trial')} on "
        f"{', '.join(dict.fromkeys(row.defense for row in members))}: {reason}"
        for (attack, reason), members in failed.items()
    ]


NOT_ENDED = "the run has not ended, or is not scored to its end"
"""Why nothing follows from its rows yet."""

_TRY = "; try more iterations or restarts, batch size 1, or another attack (`fedsim list attacks`)"


def invalid_comparisons(rows: Sequence[LeaderboardRow]) -> dict[Comparison, str]:
    """Maps each comparison from which nothing follows to the reason.

    Its control did not pass, or its runs have not ended.
    """
    return {
        control.comparison: control.reason if control.ended else NOT_ENDED
        for control in positive_controls(rows)
        if control.mark
    }


def warnings(rows: Sequence[LeaderboardRow]) -> list[str]:
    """Returns a line for each problem that weakens the figures, with its remedy.

    Problems are models that do not show what a defense costs, poor guesses, attacks that failed,
    and attacks that were run on no other update.
    """
    shown = list(dict.fromkeys(row.comparison for row in rows))
    several = len(shown) > 1
    lines: dict[str, None] = {}
    for comparison in shown:
        members = [row for row in rows if row.comparison == comparison]
        where = f"{describe_comparison(comparison, shown)}, " if several else ""
        lines |= {
            f"{where}{row.defense}: {p}": None for row in members if (p := row.learning_problem)
        }
        lines |= {f"{where}{line}": None for line in describe_failures(members)}
        poor = [row for row in members if row.guess_problem]
        if poor:
            worst = min(poor, key=lambda row: (-row.near_copies, row.guess_public_per_image or 0.0))
            sizes = ", ".join(map(str, sorted({row.batch_size for row in poor})))
            lines[f"{where}batch size {sizes}, at worst: {worst.guess_problem}"] = None
        ended = [row for row in members if row.ended]
        for reason in dict.fromkeys(row.no_control for row in ended if row.no_control):
            attacks = dict.fromkeys(row.attack for row in members if row.no_control == reason)
            lines[f"{where}{', '.join(attacks)}: {reason}{_NO_CONTROL}"] = None
    return list(lines)


_NO_CONTROL = (
    ", so that nothing tells what an attack knew beforehand from what it read off the update; "
    "attack two trials or more of different images (`observe.trials`)"
)


def invalid_reasons(rows: Sequence[LeaderboardRow], *, unended: bool = True) -> list[str]:
    """Returns why comparisons among `rows` prove nothing; empty if every control passed.

    Each is judged by itself: one whose attacks do not work says nothing of another. `unended` says
    whether those count whose runs have not ended.
    """
    if not rows:
        return ["no positive control: there are no results"]
    judged = [row.comparison for row in rows if unended or row.ended]
    shown = {row.comparison for row in rows}
    several = len(shown) > 1
    return [
        f"{describe_comparison(comparison, shown)}: {reason}" if several else reason
        for comparison, reason in invalid_comparisons(rows).items()
        if comparison in judged
    ]


def describe_comparison(comparison: Comparison, beside: Iterable[Comparison] = ()) -> str:
    """Words a comparison, its threat model unless that is the honest server, and who else looks.

    For instance `quickstart (training.mode=eval), faces, convnet`. The honest server is named, too,
    if the comparison is shown `beside` any of another threat model.
    """
    scenario, variant, dataset, model, threat, watcher = comparison
    done = f", {threat.server} by a malicious server" if threat.malicious else ""
    if threat.is_default and any(other[-2] != threat for other in beside):
        done = f", {threat.title}"
    done += threat.differs
    done += "" if watcher == "server" else f", seen by {_WATCHERS.get(watcher, watcher)}"
    return f"{scenario}{f' ({variant})' if variant else ''}, {dataset}, {model}{done}"


_WATCHERS = {"client": "a participant", "eavesdropper": "an eavesdropper"}


def _control(comparison: Comparison, rows: Sequence[LeaderboardRow]) -> Control:
    """Judges one comparison by the strongest attack on its undefended stack."""
    undefended = [row for row in rows if row.undefended]
    lesson = _LESSON if len(undefended) < len(rows) else _LESSON_ALONE
    if not undefended:
        return Control(
            comparison=comparison,
            status="absent",
            reason="no positive control: no undefended stack was attacked; add `none: []` to "
            "defenses, for an attack that fails without a defense says nothing about defenses",
        )
    size = min(row.batch_size for row in undefended)
    undefended = [row for row in undefended if not row.ignores_update] or undefended
    attacked = [row for row in undefended if row.batch_size == size and row.gain]
    areas = [
        (area, row.attack)
        for row in undefended
        if row.batch_size == size and (area := row.metrics["membership_auc"])
        if not _is_blind(row.membership_over_other)
    ]
    of_membership = (
        _membership_control(comparison, *max(areas, key=lambda entry: entry[0].mean), size, lesson)
        if areas
        else None
    )
    spans = [
        (_is_blind(row.span_over_other) and row.is_decided, span.mean / row.guessed_span, row)
        for row in undefended
        if row.batch_size == size and (span := row.metrics["subspace_error"])
    ]
    of_features = (
        _feature_control(comparison, *min(spans, key=lambda entry: entry[:2]), lesson)
        if spans
        else None
    )
    if not attacked:
        if of_features:
            return of_features
        if of_membership:
            return of_membership
        return Control(
            comparison=comparison,
            status="failed",
            reason=f"no attack recovered {rows[0].subject} of the undefended stack at batch size "
            f"{size}, so there is no gain over guessing to show that the attacks work{_TRY}",
        )
    best = max(attacked, key=lambda row: row.standing)
    gain = best.gain.mean if best.gain else 0.0
    blind = best.blind
    passed = best.strength[0] >= REQUIRED_GAIN and not blind
    for other in (of_membership, of_features):
        # A release that is random by itself may tell who is in it and no more; a head of many
        # images, its features.
        if not passed and other and other.status == "passed":
            return other
    due = "" if passed or blind else _due(best)
    measured = (
        f"undefended, at batch size {size}, {best.attack} gains {format_number(gain, 1)} dB over "
        f"guessing{_uncontrolled(best)}{due}"
    )
    if blind and gain >= REQUIRED_GAIN:
        return _blind_control(comparison, measured)
    return _judged(comparison, passed, measured, f"{REQUIRED_GAIN:g} dB are required", lesson)


_LESSON = "attacks that fail without a defense say nothing about defenses"
_LESSON_ALONE = "that these attacks fail is no proof that others do"
"""As `_LESSON`, where nothing was defended."""


def _judged(
    comparison: Comparison, passed: bool, measured: str, required: str, lesson: str
) -> Control:
    failed = f"{measured}, where {required}: {lesson}{_TRY}"
    return Control(
        comparison=comparison,
        status="passed" if passed else "failed",
        reason=measured if passed else failed,
    )


def _is_blind(over_other: Summary | None) -> bool:
    """Whether the attack does no better on its own update than on another."""
    return over_other is not None and over_other.certain <= 0


def _due(row: LeaderboardRow) -> str:
    """Words how little of a gain is due to the update."""
    if not row.gain or row.gain.mean < REQUIRED_GAIN:
        return ""
    return f", of which {format_number(row.strength[0], 1)} dB over {row.other}"


def _uncontrolled(row: LeaderboardRow) -> str:
    return f" ({row.no_control})" if row.no_control else ""


def _blind_control(comparison: Comparison, measured: str) -> Control:
    return Control(
        comparison=comparison,
        status="failed",
        reason=f"{measured}, and does as well with another update: what an attack knew beforehand "
        f"does not show that attacks work{_TRY}",
    )


def _feature_control(
    comparison: Comparison, blind: bool, share: float, row: LeaderboardRow, lesson: str
) -> Control:
    span = row.metrics["subspace_error"]
    assert span is not None
    required = REQUIRED_SPAN * row.guessed_span
    measured = (
        f"undefended, at batch size {row.batch_size}, {row.attack} leaves a span error of "
        f"{span.mean:.3f}{_uncontrolled(row)}"
    )
    passed = share <= REQUIRED_SPAN
    if passed and blind:
        return _blind_control(comparison, measured)
    needed = f"at most {required:.3g} is required, half of what the guess leaves"
    return _judged(comparison, passed, measured, needed, lesson)


def _membership_control(
    comparison: Comparison, area: Summary, attack: str, size: int, lesson: str
) -> Control:
    measured = (
        f"undefended, at batch size {size}, {attack} tells members from others with an AUC of "
        f"{area.mean:.2f}"
    )
    passed = area.mean >= REQUIRED_AUC
    return _judged(comparison, passed, measured, f"{REQUIRED_AUC:g} is required", lesson)
