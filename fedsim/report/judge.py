"""Judges what follows from the attacks of a comparison; `fedsim.report.messages` words it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from fedsim.contracts.target import Target, ranking_targets
from fedsim.report.facts import round_seconds, runs_of, unfinished
from fedsim.report.row import Comparison, LeaderboardRow, by_comparison
from fedsim.results.reading import StoredRun
from fedsim.scoring import LEAST, Share, Summary, chance_of
from fedsim.words import NO_DIFFERENTIAL_PRIVACY

Level = str
"""How badly a defense leaks: `leak`, `partial`, `features`, the part of another target (`labels`),
`undecided`, `unseen`, `unknown` (not attacked), `failed` or `invalid`. `undecided`: an attack gains
something, and no control tells whether it read that off the update or knew it."""

Finding = str
"""What an attacker gets, the worst that the attacks on a defense achieved: `recognizable`, `colors
only`, `features`, the part of another target (`labels`), `some trials`, `undecided`, `nothing`,
`failed`, `unknown` or `no answer`. `some trials`: nothing is certain, but a few trials leak, or
labels or members on average. `undecided`: something that nothing tells from what the attack knew.
`no answer`: the rows are INVALID, or some of them are still to come."""

Reliance = Literal["rely", "do not rely", "not shown"]

ControlStatus = Literal["passed", "failed", "broken", "absent"]
"""State of a positive control. `broken`: attacks crashed or refused, and no other one decides."""

Leaking = str
"""What an attack may work on: `pictures` (the main target, images or rows), or another's part."""

WEAK_EPSILON = 10.0
"""A finite guarantee promises next to nothing from this ε on."""

LARGEST_DELTA = 1e-3
"""Above this δ a guarantee may fail for one person in a thousand, and nothing rests on it."""

_LEAST_SKILL = 0.5
"""A model that reaches less than this share of what it learns without a defense, above chance, has
updates that may hold little."""

_LEAST_LEARNED = 0.1
"""A model has learned if the lower end of its accuracy's interval lies this share of the way from
chance to certainty."""

_CERTIFIED, _COSINE = "feature_cosine", 0.999
"""A guess of this mean in this metric is as good as certified features, which then say nothing."""

_ALWAYS_ASKED = ("labels", "membership")
"""Targets besides the main one that are called untried where no attack was after them."""

_FALSE = 0.05
"""A certificate says nothing if more than this share of them is false: luck makes some right."""

_CHANCE = 0.05
"""A difference between two counts of trials is one if chance makes it less often."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One of a list of things to say: a message and, by name, the `values` to fill in."""

    kind: str
    """Key of `messages.STATEMENTS`, or `untried` and a part of a target, such as `untried rows`."""
    values: Mapping[str, Any] = field(default_factory=dict)


def _state(kind: str, **values: Any) -> Statement:
    return Statement(kind=kind, values=values)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An attack, by label, that failed for one reason in `count` trials on stacks `defenses`."""

    attack: str
    reason: str
    count: int
    n: int
    """Number of all trials, failed or not, of the leaderboard rows in which it failed so."""
    defenses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Control:
    """Says whether the attacks work on a comparison's undefended stack.

    An attack that fails without a defense says nothing about defenses. The `status` is `passed`,
    `failed`, `broken` (attacks crashed or refused, and no other decides) or `absent` (no undefended
    stack). The smallest `batch_size` alone is judged, by the name of a `metric`. `failures` on the
    undefended stack are there unless it passed. `is_blind`: the attack does as well with another
    update. `is_alone`: no stack has a defense. Fields are None without an attack to judge.
    """

    comparison: Comparison
    subject: str
    """Part of the main target that was attacked: `images` or `rows`."""
    status: ControlStatus
    best: LeaderboardRow | None = None
    """The undefended row that decides; None if none of them has what would."""
    metric: str | None = None
    value: float | None = None
    """What the attack reached: its gain over guessing if `metric` is the main target's, else the
    mean of `metric`."""
    required: float | None = None
    """What `value` has to reach, or of an error to stay at or below."""
    due: float | None = None
    """The part of `value` that is due to the update, dB, where that alone falls short of
    `required`; else None."""
    is_blind: bool = False
    batch_size: int | None = None
    failures: tuple[Failure, ...] = ()
    is_alone: bool = False
    ended: bool = True
    """Whether the runs have ended: until then nothing follows, whatever the status so far."""

    @property
    def mark(self) -> str:
        """`UNFINISHED` or `INVALID` over a table from which nothing follows; empty if it does."""
        if not self.ended:
            return "UNFINISHED"
        return "" if self.status == "passed" else "INVALID"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The attack on a defense that shows most by one metric, whose name is `metric`."""

    row: LeaderboardRow
    metric: str
    is_informed: bool = True
    """Whether it does better than with another update, as far as there is one."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Number of trials of one attack in which something happened: `count` of `n`, or more."""

    count: int
    n: int
    or_more: bool = False


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a defense leaves of the model, and what it takes, beside no defense; None: not known."""

    points: float | None = None
    """Test accuracy less that without a defense, in percentage points; a loss is negative."""
    is_apart: bool = True
    """Whether test sets of this size tell the two accuracies apart; True if one is not known."""
    is_measured: bool = True
    """Whether the model without a defense learned something, for all that is known."""
    seconds: float | None = None
    """Mean seconds of a round of training."""
    usual_seconds: float | None = None
    """Those without a defense."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Judges one defense of one comparison, by all attacks on it; `sentence` words it.

    The strongest attack was chosen among several, so intervals are Bonferroni's for that number.
    None is what was not measured. The stack called `defense` has the members `stack`, in words.
    The `finding` is the worst that an attacker gets, as `recognizable` or `nothing`, and `besides`
    is what else leaks for certain. There were `trials` attack runs, failed or not, and `attacks`
    with a gain. `times` counts trials with recognizable pictures, where these are some only.
    `features` and `certificates` are the attacks that recovered, or certified, most. `reliance` is
    `rely`, `do not rely` or `not shown`, for the `reason`; `cautions` are what else to know, and
    `untried` is what no attack on the defense tried.
    """

    defense: str
    stack: str
    undefended: bool
    level: Level
    """How badly the defense leaks: as `level_of` says, `invalid` where the control did not pass, or
    the part of another target that leaks."""
    finding: Finding
    besides: tuple[Leaking, ...]
    strongest: LeaderboardRow
    """The attack that the defense is judged by; it may be uninformed, or have failed."""
    gain: Summary | None
    """The attack's gain over guessing in dB; of an uninformed attack, the part that is due to this
    update. None if only features or labels were attacked."""
    trials: int
    attacks: int
    is_bounded: bool
    """Whether the interval of `gain` ends below what counts as a leak."""
    leaking: Share | None
    """Trials in which the gain counts as a leak, by the attack with the largest share."""
    times: Times | None
    is_rare: bool
    """Whether a single trial or image shows a leak that the means do not."""
    exposed_image: float | None
    """PSNR, dB, of the best image that leaks by itself."""
    features: Shown | None
    told: Mapping[Leaking, Shown]
    """Part of a target (`labels`, `membership`, ...) -> the attack that told it best, even if no
    better than guessing. Parts that no attack tried, or that it was given, are missing."""
    certificates: Shown | None
    may_leak: tuple[Leaking, ...]
    """Parts of targets that an attack told better than guessing on average, certain or not."""
    labels_stand: bool
    """Whether labels that were told are stated, though the finding is `no answer`."""
    costs: Costs
    reliance: Reliance
    reason: Statement
    cautions: tuple[Statement, ...]
    untried: tuple[Statement, ...]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Judges one comparison: by its control whether attacks work, by `verdicts` each defense."""

    comparison: Comparison
    control: Control
    verdicts: tuple[Verdict, ...]

    @property
    def untried(self) -> tuple[Statement, ...]:
        """What no attack tried on any of the defenses."""
        first = self.verdicts[0].untried
        return tuple(kind for kind in first if all(kind in v.untried for v in self.verdicts))


def judge(rows: Sequence[LeaderboardRow], runs: Sequence[StoredRun] = ()) -> Judgement:
    """Judges the rows of one comparison, at least one, by the runs that they are from.

    If the control did not pass, or a run has not ended or is not scored, no defense gets an answer.
    Without `runs`, audits, times and untried rounds are not known.
    """
    control = _control(rows)
    undefended = [row for row in rows if row.undefended]
    refuted = {audit.defense for run in runs for audit in run.audits if not audit.holds}
    trained = {row.round for run in runs for row in run.rounds}
    seconds = round_seconds(runs)
    return Judgement(
        comparison=rows[0].comparison,
        control=control,
        verdicts=tuple(
            _verdict(
                [row for row in rows if row.defense == name],
                undefended,
                control=control,
                is_late=bool(unfinished(runs)),
                is_refuted=name in refuted,
                trained=trained,
                seconds=seconds,
            )
            for name in dict.fromkeys(row.defense for row in rows)
        ),
    )


def judgements(rows: Sequence[LeaderboardRow], runs: Sequence[StoredRun] = ()) -> list[Judgement]:
    """Returns the judgement (`judge`) of each comparison among `rows` of `runs`, in their order."""
    return [judge(own, runs_of(own, runs)) for own in by_comparison(rows).values()]


def positive_controls(rows: Sequence[LeaderboardRow]) -> list[Control]:
    """Returns the positive control of each comparison among `rows`, in their order."""
    return [_control(own) for own in by_comparison(rows).values()]


_Measure = Callable[[LeaderboardRow], Summary | None]


def _count_compared(rows: Sequence[LeaderboardRow], measure: _Measure) -> int:
    """Returns the number of attacks with a `measure`, of which the best is chosen; at least 1."""
    return max(1, sum(row.n_ok > 0 and measure(row) is not None for row in rows))


def _best_of_several(
    row: LeaderboardRow, rows: Sequence[LeaderboardRow], measure: _Measure
) -> Summary | None:
    """Returns `measure(row)`, its interval allowing for the choice of `row` among `rows`."""
    summary = measure(row)
    return summary and summary.best_of(_count_compared(rows, measure))


def level_of(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> Level:
    """Returns how badly `row`, chosen among all `rows` of its stack, leaks pictures or features.

    It is `leak`, `partial` (a small gain), a target's part such as `features`, `undecided` (nothing
    tells a gain from prior knowledge), `unseen` (no gain), `unknown` (not attacked) or `failed`.
    Lower ends of intervals decide, which widen with the number of `rows`. Labels and members do not
    count.
    """
    if row.n_ok == 0:
        return "failed"
    pictures = _level_of_pictures(row, rows)
    if pictures in ("leak", "partial"):
        return pictures
    for what, target in targets_by_mean().items():
        if _leaks_by_mean(row, rows, what):
            return what
        pictures = pictures or ("unseen" if row.metrics[target.ranking.name] else None)
    return pictures or "unknown"


def _level_of_pictures(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> Level | None:
    """Judges images, or rows of a table; None if the attack answers none."""
    if row.gain is None:
        return None
    if row.ignores_update:
        return "unseen"
    level = _level_by_gains(row, rows, controlled=row.no_control is None)
    if row.is_decided:
        return level
    whole = _level_by_gains(row, rows, controlled=False)
    if level != "unseen" and row.no_control is None:
        # Better even than another batch of the same client, which makes no leak a lesser one.
        return "leak" if "leak" in (level, whole) else level
    # Nothing tells what the attack read from what it knew.
    return "unseen" if whole == "unseen" else "undecided"


def _level_by_gains(
    row: LeaderboardRow, rows: Sequence[LeaderboardRow], *, controlled: bool
) -> Literal["leak", "partial", "unseen"]:
    """Judges what was gained over the guess and, if `controlled`, over another update."""
    gain = _best_of_several(row, rows, lambda r: r.gain)
    assert gain is not None
    own = row.own_gain if controlled else row.gain
    exposes = row.main.exposes
    if own is not None and exposes is not None and own.min >= exposes:
        return "leak"  # in every trial
    if any(_is_alike_for_certain(row, rows, name, controlled) for name in row.likeness):
        return "leak"
    over = _best_of_several(row, rows, lambda r: r.over_other) if controlled else None
    certain = gain.certain if over is None else min(gain.certain, over.certain)
    # Of too few trials for an interval, half of all attacks that see nothing gain something, and
    # nothing allows for the choice of the best.
    several = min(gain.n, gain.n if over is None else over.n) >= LEAST
    if certain >= row.main.leaks and (several or gain.compared == 1):
        return "leak"
    return "partial" if (certain > 0 and several) or row.exposed else "unseen"


def _is_alike_for_certain(
    row: LeaderboardRow, rows: Sequence[LeaderboardRow], name: str, controlled: bool
) -> bool:
    """Whether pictures leak by metric `name` of their likeness, whatever their pixels."""

    def measure(each: LeaderboardRow) -> Summary | None:
        likeness = each.likeness.get(name)
        if likeness is None:
            return None
        return likeness.own if controlled else likeness.over_guess

    gain, main = _best_of_several(row, rows, measure), row.main
    certain = gain is not None and gain.n >= LEAST and gain.certain >= main.likeness_gain
    return certain and main.is_alike(row.means, [name])


def _is_alike_on_average(row: LeaderboardRow) -> bool:
    main, means = row.main, row.means
    alike = main.is_alike(means, row.likeness) or main.is_recognizable(means)
    return alike and main.agrees(means)


def _shows_pictures(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether `row` leaks recognizable pictures, on average or in one of its trials."""
    level = level_of(row, rows)
    if row.exposed or (level in ("leak", "partial") and row.recognizable > 0):
        return True
    return level == "leak" and _is_alike_on_average(row)


def targets_by_mean() -> dict[Leaking, Target]:
    """Returns `Target.part` -> target, of the targets that are judged by their mean error."""
    found = ranking_targets().values()
    return {target.part: target for target in found if target.ranks_by == "mean"}


def _leaks_by_mean(row: LeaderboardRow, rows: Sequence[LeaderboardRow], what: Leaking) -> bool:
    """Whether `what`, such as features, was read off the update, or is certified to be right."""
    target = targets_by_mean()[what]
    name = target.ranking.name
    if row.n_ok == 0 or _is_given(row, what):
        return False
    if target.itemwise and _is_certified(row) and any(row.metrics[m.name] for m in target.metrics):
        return True
    error = _best_of_several(row, rows, lambda r: r.metrics[name])
    if error is None:
        return False
    upper = error.mean if error.high is None else error.high
    over = _best_of_several(row, rows, lambda r: r.above_other(name))
    uninformed = _does_no_better(over) and row.control != "batch"
    return upper <= target.leaks * row.guess_of(name) and not uninformed


def _is_certified(row: LeaderboardRow) -> bool:
    """Whether an attacker knows of an answer that it is right, and it is, where guesses are not."""
    stated = row.certificates
    if stated is None or not stated.certified or stated.false is None:
        return False
    guessed = row.baseline[_CERTIFIED]
    holds = stated.false <= _FALSE * stated.certified
    return holds and (guessed is None or guessed < _COSINE)


def _told_targets() -> dict[Leaking, Target]:
    """Returns `Target.part` -> target, of targets whose values are told: labels, members."""
    found = [target for target in ranking_targets().values() if not target.payloads]
    return {target.part: target for target in found if target.ranks_by != "mean"}


def _leaks_told(row: LeaderboardRow, rows: Sequence[LeaderboardRow], what: Leaking) -> bool:
    """Whether `what`, labels or members, was certainly told from the update, not guessed."""
    told = _told_targets()[what]
    gain = _best_of_several(row, rows, lambda r: r.above_guess(told.ranking.name))
    if gain is None or _is_given(row, what):
        return False
    if told.itemwise and _is_certified(row) and gain.mean >= told.leaks:
        return True
    if told.ranking.uninformed is None and gain.n < LEAST:
        return False
    certain = gain.certain
    # Trials without an interval say nothing of chance by themselves, but their candidates do.
    beyond = row.metrics.get(f"{told.ranking.name}_beyond_chance")
    if gain.low is None and beyond is not None:
        certain = min(certain, told.ranking.gain(beyond.mean, told.ranking.uninformed or 0.0))
    return certain >= told.leaks and not _fits_any_update(row, what)


def _is_given(row: LeaderboardRow, what: Leaking) -> bool:
    """Whether the attacker was given what it tells, or tells it without looking."""
    return row.ignores_update or getattr(row.knowledge, what, None) == "known"


def _fits_any_update(row: LeaderboardRow, what: Leaking) -> bool:
    """Whether the attack tells no more of `what` from its own update than from another."""
    told = _told_targets()[what]
    over = row.above_other(told.ranking.name)
    if over is None:
        # Always answering one class may beat a guess from public images, but never a coin.
        return told.ranking.uninformed is None
    return over.mean < told.leaks


def _may_tell(row: LeaderboardRow, what: Leaking) -> bool:
    """Whether `what`, labels or members, was told better than by guessing, by the mean alone."""
    told = _told_targets()[what]
    gain, over = row.above_guess(told.ranking.name), row.above_other(told.ranking.name)
    if gain is None or _is_given(row, what):
        return False
    # Another batch of the same client may have the same labels.
    same = over is not None and over.mean < told.leaks and row.control != "batch"
    return gain.mean >= told.leaks and not same


def _leaks(row: LeaderboardRow, rows: Sequence[LeaderboardRow], what: Leaking) -> bool:
    if what == "pictures":
        return level_of(row, rows) in ("leak", "partial")
    judged = _leaks_by_mean if what in targets_by_mean() else _leaks_told
    return judged(row, rows, what)


def _leakable() -> tuple[Leaking, ...]:
    return ("pictures", *targets_by_mean(), *_told_targets())


def works(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    """Whether anything leaks for certain to the attack of `row`, one of all `rows` of its stack.

    They are of one comparison, and their number widens intervals.
    """
    return any(_leaks(row, rows, what) for what in _leakable())


def failures_of(rows: Iterable[LeaderboardRow]) -> tuple[Failure, ...]:
    """Returns how often each attack failed for each reason, and on which stacks; empty if none."""
    failed: dict[tuple[str, str], list[LeaderboardRow]] = {}
    for row in rows:
        for reason in row.failures:
            failed.setdefault((row.attack, reason), []).append(row)
    return tuple(
        Failure(
            attack=attack,
            reason=reason,
            count=sum(row.failures[reason] for row in members),
            n=sum(row.n for row in members),
            defenses=tuple(dict.fromkeys(row.defense for row in members)),
        )
        for (attack, reason), members in failed.items()
    )


def _control(rows: Sequence[LeaderboardRow]) -> Control:
    undefended = [row for row in rows if row.undefended]
    basis = Control(
        comparison=rows[0].comparison,
        subject=rows[0].main.part,
        status="absent" if not undefended else "failed",
        is_alone=len(undefended) == len(rows),
        ended=all(row.ended for row in rows),
    )
    if not undefended:
        return basis
    size = min(row.batch_size for row in undefended)
    sighted = [row for row in undefended if not row.ignores_update] or undefended
    control = _judge_control(
        replace(basis, batch_size=size), [row for row in sighted if row.batch_size == size]
    )
    failures = failures_of(undefended)
    if control.status != "failed" or not failures:
        return control
    # A crash, or a refusal, is no attack that does not work.
    shown = [row for row in undefended if row.batch_size == size and row.n_ok]
    names = [target.ranking.name for target in _deciding()]
    ran = any(row.gain or any(row.metrics[name] for name in names) for row in shown)
    return replace(control, failures=failures, status="failed" if ran else "broken")


def _judge_control(basis: Control, rows: Sequence[LeaderboardRow]) -> Control:
    """Judges by gains, and by features or members where these show what gains do not."""
    others = [each for target in _deciding() if (each := _control_by(basis, rows, target))]
    attacked = [row for row in rows if row.gain]
    if not attacked:
        return others[-1] if others else basis
    best = max(attacked, key=lambda row: row.standing)
    uninformed, main = best.is_uninformed, best.main
    due = best.strength_by(main.ranking.name)
    passed = due >= main.leaks and not uninformed
    for other in others:
        # A random release may tell who is in it and no more; a head of many images, its features.
        if not passed and other.status == "passed":
            return other
    gain = best.gain.mean if best.gain else 0.0
    return replace(
        basis,
        status="passed" if passed else "failed",
        best=best,
        metric=main.ranking.name,
        value=gain,
        required=main.leaks,
        due=None if passed or uninformed or gain < main.leaks else due,
        is_blind=uninformed and gain >= main.leaks,
    )


def _does_no_better(over_other: Summary | None) -> bool:
    return over_other is not None and over_other.certain <= 0


def _deciding() -> list[Target]:
    told = [target for target in _told_targets().values() if target.works is not None]
    return [*told, *targets_by_mean().values()]


def _control_by(basis: Control, rows: Sequence[LeaderboardRow], target: Target) -> Control | None:
    """Judges by the mean of a target's metric, beside the guess's; None if nobody answered it."""
    metric, by_mean = target.ranking, target.ranks_by == "mean"
    name = metric.name
    entries = []
    for row in rows:
        if (mean := row.metrics[name]) is None:
            continue
        guess = row.guess_of(name)
        reached = 1 - mean.mean / guess if by_mean else metric.gain(mean.mean, guess)
        # What does as well on another client's update has not read this one.
        uninformed = _does_no_better(row.above_other(name)) and (row.is_decided or not by_mean)
        entries.append((not uninformed, reached, mean.mean, guess, row))
    if not entries:
        return None
    informed, reached, value, guess, best = max(entries, key=lambda entry: entry[:2])
    required = target.works or 0.0
    at_least = guess + required if metric.larger_leaks else guess - required
    enough = reached >= (1 - target.leaks if by_mean else required)
    return replace(
        basis,
        status="passed" if enough and informed else "failed",
        best=best,
        metric=name,
        value=value,
        required=target.leaks * guess if by_mean else at_least,
        is_blind=enough and not informed,
    )


def _strongest(rows: Sequence[LeaderboardRow]) -> LeaderboardRow:
    first = max(rows, key=lambda row: row.standing)
    if level_of(first, rows) not in ("undecided", "unseen", "unknown"):
        return first
    order: tuple[Level, ...] = ("undecided", *targets_by_mean(), "partial", "leak")
    levels = [(level_of(row, rows), row) for row in rows]
    leaks = [(order.index(level), row) for level, row in levels if level in order]
    if leaks:
        return max(leaks, key=lambda entry: (entry[0], entry[1].standing))[1]
    tried = [row for row in rows if row.n_ok and row.gain]
    whole = [row for row in tried if not row.masked]
    return max(whole or tried, key=lambda row: row.standing, default=first)


def _verdict(
    rows: Sequence[LeaderboardRow],
    undefended: Sequence[LeaderboardRow],
    *,
    control: Control,
    is_late: bool,
    is_refuted: bool,
    trained: Collection[int],
    seconds: Mapping[str, float],
) -> Verdict:
    """Judges one defense, which has `rows`; `seconds` are those of a round, by defense."""
    strongest = _strongest(rows)
    gain = _best_of_several(
        strongest, rows, lambda r: r.own_gain if strongest.is_uninformed else r.gain
    )
    leaking = _leaking(rows, strongest)
    level = _level(rows, strongest, control)
    decides = ranking_targets()[control.metric].part if control.metric else ""
    is_weak = decides in _told_targets() and any(_leaks(r, undefended, decides) for r in undefended)
    unanswerable = _unanswerable(control, strongest, is_late=is_late, is_weak=is_weak)
    finding = "no answer" if unanswerable else _finding(rows, level, leaking)
    verdict = Verdict(
        defense=strongest.defense,
        stack=strongest.stack,
        undefended=strongest.undefended,
        level=level,
        finding=finding,
        besides=_besides(rows, finding),
        strongest=strongest,
        gain=gain,
        trials=sum(row.n for row in rows),
        attacks=len({row.attack for row in rows if row.n_ok and row.gain}),
        is_bounded=gain is not None and gain.high is not None and gain.high < strongest.main.leaks,
        leaking=leaking,
        times=_recognizable_times(rows) if _is_seldom(rows, finding) else None,
        is_rare=any(row.may_expose and not row.ignores_update for row in rows),
        exposed_image=max((row.exposed_image or 0.0 for row in rows), default=0.0) or None,
        features=_shown_features(rows),
        told={what: shown for what in _told_targets() if (shown := _shown_told(rows, what))},
        certificates=_shown_certificates(rows),
        may_leak=tuple(
            what for what in _told_targets() if any(_may_tell(row, what) for row in rows)
        ),
        labels_stand=bool(unanswerable and not is_late)
        and any(_may_tell(row, "labels") for row in rows),
        costs=_costs(strongest, undefended[0] if undefended else None, seconds),
        reliance="not shown",
        reason=unanswerable or _state("no defense"),
        cautions=(),
        untried=() if is_late else _list_untried(rows, trained),
    )
    doubts = _doubts(verdict, rows, undefended, is_refuted)
    cautions = (each for each in doubts if each.kind in _CAUTIONS)
    verdict = replace(verdict, cautions=(*_sample_problems(strongest), *cautions))
    if unanswerable:
        return verdict
    reason = doubts[0] if doubts else _state("promised")
    return replace(verdict, reliance=_RELIANCES.get(reason.kind, "not shown"), reason=reason)


def _unanswerable(
    control: Control, row: LeaderboardRow, *, is_late: bool, is_weak: bool
) -> Statement | None:
    if is_late:
        return _state("not ended")
    if control.status == "broken":
        return _state("attacks broken", failures=control.failures)
    if control.status == "failed" and is_weak:
        return _state("attacks weak")
    if control.status == "absent":
        return _state("nothing undefended")
    if control.status == "failed":
        return _state("attacks fail here" if row.undefended else "attacks fail")
    return None


def _level(rows: Sequence[LeaderboardRow], strongest: LeaderboardRow, control: Control) -> Level:
    # Undefended rows stand on their own: what leaks there leaks, whatever the control asks for.
    doubtful = control.status != "passed" and not strongest.undefended
    level = "invalid" if doubtful or not control.ended else level_of(strongest, rows)
    if level in ("undecided", "unseen", "unknown"):
        for what in _told_targets():
            if any(_leaks_told(row, rows, what) for row in rows):
                return what
    return level


def _leaking(rows: Sequence[LeaderboardRow], strongest: LeaderboardRow) -> Share | None:
    """Returns the largest share of trials that leak, allowing for the choice of the attack."""
    most = max(
        (row for row in rows if row.leaking and not row.ignores_update),
        key=lambda row: row.leaking.count / row.leaking.n if row.leaking else 0.0,
        default=strongest,
    )
    return most.leaking and most.leaking.best_of(_count_compared(rows, lambda r: r.gain))


_OF_LEVEL: Mapping[Level, Finding] = {
    "leak": "colors only",
    "partial": "colors only",
    "undecided": "undecided",
    "unseen": "nothing",
    "unknown": "unknown",
    "failed": "failed",
    "invalid": "no answer",
}


def is_leak(finding: Finding) -> bool:
    """Whether `finding`, such as `Verdict.finding`, says that something leaks for certain."""
    return finding in ("recognizable", "colors only", *_leakable())


def _finding(rows: Sequence[LeaderboardRow], level: Level, leaking: Share | None) -> Finding:
    if any(_shows_pictures(row, rows) for row in rows):
        return "recognizable"
    may_leak = (leaking and leaking.count) or any(map(_may_show, rows))
    if level in ("unseen", "unknown") and may_leak:
        return "some trials"
    return _OF_LEVEL.get(level, level)


def _may_show(row: LeaderboardRow) -> bool:
    """Whether something leaked that no interval makes certain, or that nobody has compared."""
    stated = row.certificates
    claims = stated is not None and bool(stated.certified) and stated.false is None
    rare = row.may_expose and not row.ignores_update
    return claims or rare or any(_may_tell(row, what) for what in _told_targets())


def _besides(rows: Sequence[LeaderboardRow], finding: Finding) -> tuple[Leaking, ...]:
    if not is_leak(finding):
        return ()
    return tuple(
        what
        for what in _leakable()[1:]
        if what != finding and any(_leaks(row, rows, what) for row in rows)
    )


def _is_seldom(rows: Sequence[LeaderboardRow], finding: Finding) -> bool:
    """Whether pictures are recognizable in some trials only, and not on average."""
    if finding != "recognizable":
        return False
    leaking = [row for row in rows if level_of(row, rows) == "leak"]
    return not any(_is_alike_on_average(row) or (row.own_gain and row.exposed) for row in leaking)


def _recognizable_times(rows: Sequence[LeaderboardRow]) -> Times:
    shown = [row for row in rows if _shows_pictures(row, rows)]
    best = max(shown, key=lambda row: row.recognizable / row.n)
    leaking = best.leaking.count if best.leaking else 0
    counted = best.recognizable and not (best.exposed and best.recognizable < leaking)
    return Times(count=max(1, best.recognizable), n=best.n, or_more=not counted and best.n > 1)


def _shown_features(rows: Sequence[LeaderboardRow]) -> Shown | None:
    """Returns the attack with the least error of what leaks by its mean, beside pictures."""
    leaking = [
        (row.strength_by(target.ranking.name), row, target.ranking.name)
        for what, target in targets_by_mean().items()
        for row in rows
        if row.gain and row.metrics[target.ranking.name] and _leaks_by_mean(row, rows, what)
    ]
    if not leaking:
        return None
    _, row, name = max(leaking, key=lambda entry: entry[0])
    return Shown(row=row, metric=name)


def _shown_told(rows: Sequence[LeaderboardRow], what: Leaking) -> Shown | None:
    metric = _told_targets()[what].ranking
    entries = []
    for row in rows:
        value, gain = row.metrics[metric.name], row.above_guess(metric.name)
        if value and row.n_ok and getattr(row.knowledge, what, None) != "known":
            mean = metric.gain(value.mean, 0.0)
            entries.append(
                (not _fits_any_update(row, what), gain.mean if gain else mean, mean, row)
            )
    if not entries:
        return None
    informed, *_, best = max(entries, key=lambda entry: entry[:3])
    return Shown(row=best, metric=metric.name, is_informed=informed)


def _shown_certificates(rows: Sequence[LeaderboardRow]) -> Shown | None:
    """Ranks what is known: features before labels alone, then by the share of images."""

    def rank(row: LeaderboardRow) -> tuple[bool, float, int]:
        stated = row.certificates
        certified = (stated and stated.certified) or 0
        features = certified > 0 and row.metrics[_CERTIFIED] is not None
        return features, certified / max(1, stated.images if stated else 1), certified

    stating = [r for r in rows if r.certificates and r.certificates.certified is not None]
    best = max(stating, key=rank, default=None)
    return Shown(row=best, metric=_CERTIFIED) if best else None


def _costs(
    row: LeaderboardRow, undefended: LeaderboardRow | None, seconds: Mapping[str, float]
) -> Costs:
    if undefended is None or row.undefended:
        return Costs(seconds=seconds.get(row.defense))
    own, usual, points = row.accuracy, undefended.accuracy, None
    is_measured = not undefended.learning_problem
    if is_measured and row.test_accuracy is not None and undefended.test_accuracy is not None:
        points = 100 * (row.test_accuracy - undefended.test_accuracy)
    return Costs(
        points=points,
        is_apart=not (own and usual and own.overlaps(usual)),
        is_measured=is_measured,
        seconds=seconds.get(row.defense),
        usual_seconds=seconds.get(undefended.defense),
    )


def missing_terms(row: LeaderboardRow) -> tuple[str, ...]:
    """Returns which of `delta`, `unit`, `relation` the row lacks to read its ε; empty if none."""
    terms = {"delta": row.delta, "unit": row.unit, "relation": row.relation}
    return tuple(name for name, value in terms.items() if value is None)


def _list_untried(
    rows: Sequence[LeaderboardRow], trained: Collection[int]
) -> tuple[Statement, ...]:
    measured = {name for row in rows for name, value in row.metrics.items() if value is not None}
    main = rows[0].main
    # Labels and members can be asked of any update, another target only where data have it.
    asked = [each for each in _told_targets().values() if each.part in _ALWAYS_ASKED]
    told = [each for each in asked if main.itemwise or not each.itemwise]
    smallest, rounds = min(row.batch_size for row in rows), sorted({row.round for row in rows})
    kinds: list[tuple[bool, Statement]] = [
        *(
            (each.ranking.name not in measured, _state(f"untried {each.part}"))
            for each in (main, *told)
        ),
        (main.itemwise and smallest > 1, _state("untried smaller batches", smallest=smallest)),
        (bool(set(trained) - set(rounds)), _state("untried rounds", rounds=rounds)),
        (all(row.server == "honest" for row in rows), _state("untried malicious server")),
        (all(row.vantage != "client" for row in rows), _state("untried participants")),
        (all(row.vantage in ("client", "eavesdropper") for row in rows), _state("untried server")),
        (all(row.unaware for row in rows), _state("untried knowledge")),
    ]
    return tuple(statement for is_missing, statement in kinds if is_missing)


_RELIANCES: Mapping[str, Reliance] = {
    "promised": "rely",
    "attack works": "do not rely",
    "audit refutes": "do not rely",
    "training audit refutes": "do not rely",
    "membership refutes": "do not rely",
}
"""Reasons for anything but `not shown`."""

_CAUTIONS = ("audit refutes", "weak epsilon", "some failed", "diverges")
"""Doubts that weaken a verdict whatever it is."""


def _doubts(
    verdict: Verdict,
    rows: Sequence[LeaderboardRow],
    undefended: Sequence[LeaderboardRow],
    is_refuted: bool,
) -> list[Statement]:
    """Lists what speaks against relying on a defense, the weightiest first."""
    row = verdict.strongest
    failed, total = sum(each.n - each.n_ok for each in rows), sum(each.n for each in rows)
    audits = [(r.audited_epsilon, r.epsilon) for r in rows]
    refuted = any(found and claimed is not None and found > claimed for found, claimed in audits)
    doubts = (
        _state("attack works") if is_leak(verdict.finding) else None,
        _state("audit refutes") if refuted else None,
        _state("training audit refutes") if is_refuted else None,
        _state("membership refutes") if any(row.is_refuted_by_members for row in rows) else None,
        _state("no defense") if row.undefended else None,
        _why_unmeasured(verdict, rows),
        _weakness(row),
        _state("some failed", failed=failed, total=total) if failed else None,
        None if row.undefended else _why_untested(rows, undefended),
        _scatter(rows),
        _model_problem(rows, undefended),
    )
    return [doubt for doubt in doubts if doubt]


def _why_unmeasured(verdict: Verdict, rows: Sequence[LeaderboardRow]) -> Statement | None:
    row = verdict.strongest
    if verdict.finding == "failed":
        return _state("all failed", failures=failures_of(rows))
    if verdict.finding == "unknown":
        return _state("not attacked", subject=row.main.noun)
    if verdict.finding == "undecided":
        if row.no_control:
            return _state("uncontrolled", why=row.no_control)
        return _state("control as good", control=row.control)
    return _state("more than guessed") if verdict.finding == "some trials" else None


def _weakness(row: LeaderboardRow) -> Statement | None:
    epsilon, delta = row.epsilon, row.delta
    if epsilon is None or math.isinf(epsilon):
        return _state("no guarantee")
    if terms := missing_terms(row):
        return _state("terms unstated", terms=terms)
    if row.relation in NO_DIFFERENTIAL_PRIVACY:
        return _state("no differential privacy")
    if epsilon >= WEAK_EPSILON:
        return _state("weak epsilon", epsilon=epsilon)
    if delta is not None and delta > LARGEST_DELTA:
        return _state("large delta", delta=delta)
    return None


def _why_untested(
    rows: Sequence[LeaderboardRow], undefended: Sequence[LeaderboardRow]
) -> Statement | None:
    """Returns which attack that works was not carried out on the defense; None if all were."""
    sound = [row for row in undefended if not row.diverged]
    working = [
        (what, row) for what in _leakable() for row in sound if _leaks(row, undefended, what)
    ]
    if not working:
        return _state("nothing works")
    summed = any(row.vantage == "aggregate" for row in rows)
    tried = {attempt(row, summed): row for row in rows if not row.masked}
    for what, row in working:
        where = {"attack": row.attack, "batch_size": row.batch_size, "round": row.round}
        same = tried.get(attempt(row, summed))
        if same is None:
            return _state("not tried", **where)
        if not _is_told_apart(row, same, what, len(rows)):
            return _state("not told apart", what=what, **where)
    return None


def attempt(row: LeaderboardRow, summed: bool) -> tuple[Any, ...]:
    """Returns the key (attack and parameters as JSON, round, batch size or None if `summed`)."""
    attack = json.dumps(json.loads(row.cell)["attack"], sort_keys=True)
    return attack, row.round, None if summed else row.batch_size


def _is_told_apart(
    plain: LeaderboardRow, defended: LeaderboardRow, what: Leaking, compared: int
) -> bool:
    if what == "pictures" and plain.leaking and defended.leaking:
        counts = [(s.count, s.n - s.count) for s in (plain.leaking, defended.leaking)]
        if chance_of(*counts[0], *counts[1]) <= _CHANCE:
            return True
    if target := targets_by_mean().get(what):
        name = target.ranking.name
        before, after = plain.metrics[name], defended.metrics[name]
        if before is None or after is None:  # a certificate says so by itself
            return True
        return _end(before, low=False) < _end(after.best_of(compared), low=True)
    if what == "pictures":
        before, after = plain.due, defended.due
    else:
        name = _told_targets()[what].ranking.name
        before, after = plain.above_guess(name), defended.above_guess(name)
    if before is None or after is None:
        return False
    return _end(after.best_of(compared), low=False) < _end(before, low=True)


def _end(summary: Summary, *, low: bool) -> float:
    """Returns an end of the interval; without one the extreme of the trials."""
    if low:
        return summary.min if summary.low is None else summary.low
    return summary.max if summary.high is None else summary.high


def _sample_problems(row: LeaderboardRow) -> list[Statement]:
    """Lists what the trials of `row` do not tell: their mean, or what is due to the update."""
    gain, over, problems = row.gain, row.over_other, []
    if row.independent < row.n:
        problems.append(_state("shared images", n=row.n, independent=row.independent))
    elif row.n < LEAST:
        problems.append(_state("few trials"))
    elif gain and gain.n >= LEAST and gain.low is None:
        problems.append(_state("equal trials"))
    if gain and gain.mean > 0 and over and over.certain <= 0:
        problems.append(_state("control as good", control=row.control))
    return problems


def _scatter(rows: Sequence[LeaderboardRow]) -> Statement | None:
    """Returns why the intervals allow for a leak; None if all end below one."""
    tried = [row for row in rows if row.gain and not row.masked]
    # Of an attack that does as well on another update, the part due to this one.
    gains = [
        _best_of_several(row, tried, lambda r: r.own_gain if r.is_uninformed else r.gain)
        for row in tried
    ]
    if not gains or any(gain is None or gain.n < LEAST for gain in gains):
        return _state("few trials")
    highs = [gain.high for gain in gains if gain and gain.high is not None]
    if len(highs) < len(gains):
        return _state("equal trials")
    reached, leaks = max(highs), rows[0].main.leaks
    return _state("interval reaches", high=reached) if reached >= leaks else None


def _model_problem(
    rows: Sequence[LeaderboardRow], undefended: Sequence[LeaderboardRow]
) -> Statement | None:
    """Returns why the model's updates may hold nothing; None if they are of one that learns."""
    usual = max(
        (row.accuracy for row in undefended if row.accuracy), key=lambda a: a.skill, default=None
    )
    for row in rows:
        own = row.accuracy
        if row.diverged:
            return _state("diverges", count=row.diverged, n=row.n)
        if row.learning_problem:
            return _state("learned nothing")
        if own is None and row.main.pictured:
            return _state("not tested")
        if own and usual and own.skill < _LEAST_SKILL * usual.skill:
            return _state("learns little", share=own.share, chance=own.chance)
    learned = usual and usual.low >= usual.chance + _LEAST_LEARNED * (1 - usual.chance)
    if rows[0].main.pictured and not learned:
        return _state("undefended learned nothing", least=_LEAST_LEARNED)
    return None


def dump(judged: Judgement) -> dict[str, Any]:
    """Returns `comparison`, `control` and `verdicts` of a judgement as values for JSON.

    Objects become their fields by name, infinity is `inf`, and a row is what names it: `defense`,
    `attack`, `vantage`, `batch_size`, `round` and `n`.
    """
    *where, threat, watcher = judged.comparison
    control: dict[str, Any] = _plain(judged.control)
    return {
        "comparison": [*where, threat.title, watcher],
        "control": {name: value for name, value in control.items() if name != "comparison"},
        "verdicts": [_plain(verdict) for verdict in judged.verdicts],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, LeaderboardRow):
        names = ("defense", "attack", "vantage", "batch_size", "round", "n")
        return {name: getattr(value, name) for name in names}
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return "inf" if value == math.inf else value
