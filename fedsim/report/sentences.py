"""Words a verdict: what the attacks achieved, what the model is worth, and what to beware of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsim.report.figures import (
    NO_DIFFERENTIAL_PRIVACY,
    format_bound,
    format_delta,
    format_epsilon,
    format_signed,
    format_summary,
)
from fedsim.report.level import (
    Level,
    labels_fit_any_update,
    members_fit_any_release,
    shows_pictures,
)
from fedsim.report.row import REQUIRED_GAIN, LeaderboardRow
from fedsim.scoring import LEAST, Share, Summary
from fedsim.words import in_trials, number_of

WEAK_EPSILON = 10.0
"""From this ε on a finite guarantee promises next to nothing."""


def membership_sentence(rows: Sequence[LeaderboardRow]) -> str | None:
    """Words the best attack on membership, beside what the privacy claim allows."""
    tried = [row for row in rows if row.metrics["membership_auc"]]
    if not tried:
        return None
    best = max(tried, key=lambda row: (not members_fit_any_release(row), row.strength[-1]))
    area = format_summary(best.metrics["membership_auc"], 2)
    text = (
        f"members told from others with an AUC of {area} (coin: 0.50) by {best.attack_on}, batch "
        f"size {best.batch_size}"
    )
    if best.no_control:
        text += f" ({best.no_control})"
    elif members_fit_any_release(best):
        text += ", and no better than with another release"
    text += f", n = {number_of(best.n, 'trial')}"
    if best.membership_auc_limit is not None:
        text += f"; the privacy claim allows at most {best.membership_auc_limit:.2f}"
    return text


def success_sentence(
    row: LeaderboardRow, leaking: Share | None, level: Level, compared: int
) -> str:
    """Words in how many trials the attack of `row` gained something, where the mean hides it.

    The interval of `leaking` allows for the choice among the attacks `compared`.
    """
    if leaking is None or level not in ("undecided", "unseen", "partial", "labels", "membership"):
        return ""
    over = f"guessing and over {row.other}" if row.over_other and row.is_decided else "guessing"
    times = in_trials(leaking.count, leaking.n)
    return (
        f" I{times[1:]} {row.attack_on} gained {REQUIRED_GAIN:g} dB or more over {over}; "
        f"{leaking.confidence:.0%} interval of that chance {100 * leaking.low:.0f} to "
        f"{leaking.high:.0%} {row.population}{_allowing(compared)}."
    )


def recognizable_times(rows: Sequence[LeaderboardRow]) -> str:
    """Words in how many trials pictures are recognizable, of the attack with most such trials.

    How many trials expose a picture by its gain alone is not counted: it is one at least.
    """
    shown = [row for row in rows if shows_pictures(row, rows)]
    best = max(shown, key=lambda row: row.recognizable / row.n)
    leaking = best.leaking.count if best.leaking else 0
    if best.recognizable and not (best.exposed and best.recognizable < leaking):
        return in_trials(best.recognizable, best.n)
    count = max(1, best.recognizable)
    if best.n == 1:
        return in_trials(count, best.n)
    return f"in at least {count} of {number_of(best.n, 'trial')}"


def main_sentence(row: LeaderboardRow, level: Level, gain: Summary | None) -> str:
    """Words what the strongest attack achieves."""
    if not row.ended:
        return "The run has not ended, so what these attacks have achieved so far is not judged."
    if level == "invalid":
        return "The positive control did not pass, so what these attacks achieve here says nothing."
    if level == "failed":
        return (
            "Every attack failed against this defense, which is no protection measured: "
            f"{'; '.join(row.failures)}."
        )
    where = f"at batch size {row.batch_size}, round {row.round}"
    if row.no_control:
        where += f" ({row.no_control})"
    if gain is None or row.gain is None or level == "features":
        span = row.metrics["subspace_error"]
        if span is None and (known := certificate_sentence([row])):
            return f"{known[0].upper()}{known[1:]}."
        if span is None:
            return f"No attack on {row.subject} was run against this defense."
        best = f", in the best trial {span.min:.3f}" if span.min < span.mean / 2 else ""
        text = (
            f"{row.attack_on} leaves a span error of {span.mean:.3f} of the features {where}{best} "
            f"(0: all of their span is recovered; {row.guessed_span:.3g}: what guessing leaves)"
        )
        other = row.span_over_other
        if other is None or other.certain > 0:
            return f"{text}."
        return f"{text}, and as little of them with {row.other}: it may know them beforehand."
    if level == "undecided":
        untold = row.no_control or f"{row.other} gives as much"
        return (
            f"{row.attack_on} gains {_gain(row, gain, signed=True)} over guessing {where}, and "
            f"nothing tells what it read off the update from what it knew beforehand: {untold}."
        )
    if level in ("unseen", "labels", "membership"):
        no_proof = "This is what these attacks could not do, not a proof that none can."
        finding = "did not reliably beat guessing" if row.gain.mean > 0 else "did not beat guessing"
        if row.blind:
            if row.gain.certain > 0:
                over = row.over_other.mean if row.over_other else 0.0
                extent = "as much so" if over < _INVISIBLE else "not reliably more than"
                finding = f"beats guessing, but {extent} with {row.other}"
            return (
                "No attack does reliably better on this update than on another: "
                f"{row.attack_on} {finding}, {where}. {no_proof}"
            )
        return (
            f"The strongest attack, {row.attack_on}, {finding}: {_gain(row, gain, signed=True)} "
            f"{where}. {no_proof}"
        )
    worst = row.worst["psnr"]
    image = f" Best image: {row.exposed_image:.1f} dB PSNR." if row.exposed_image else ""
    if level == "partial" and row.due and min(gain.certain, row.due.certain) <= 0:
        leaking = row.leaking
        what = f"single {row.subject}"
        if leaking and leaking.count:
            what = f"{row.subject} {in_trials(leaking.count, leaking.n)}"
        return (
            f"{row.attack_on} reconstructs {what}, the best by {row.due.max:.1f} dB, and not "
            f"for certain: {_gain(row, gain, signed=True)} {where}."
            f"{image}"
        )
    tail = "" if worst is None else f" Worst case: {worst:.1f} dB PSNR."
    if gain.certain <= 0 and not row.exposed and row.likeness:
        return (
            f"{row.attack_on} reconstructs {row.subject} by their structure, and not by their "
            f"pixels: {_alike(row)}; {_gain(row, gain, signed=True)} {where}.{tail}"
        )
    return (
        f"{row.attack_on} reconstructs {row.subject} better than guessing by {_gain(row, gain)} "
        f"{where}.{tail}"
    )


def _alike(row: LeaderboardRow) -> str:
    """Words the likeness of pictures beside the guess's."""
    parts = []
    for name in row.likeness:
        mean, guess = row.metrics[name], row.baseline[name]
        beside = "" if guess is None else f" (guess {guess:.2f})"
        parts += [f"{name.upper()} {mean.mean:.2f}{beside}"] if mean else []
    return ", ".join(parts)


_INVISIBLE = 0.05
"""A difference below so many dB is invisible at one decimal."""


def _gain(row: LeaderboardRow, gain: Summary, signed: bool = False) -> str:
    def number(value: float) -> str:
        return format_signed(value) if signed else f"{value:.1f}"

    if gain.low is None or gain.high is None:
        return f"{number(gain.mean)} dB"
    ends = f"{number(gain.low)} to {number(gain.high)}"
    interval = f"{gain.confidence:.0%} interval {ends} {row.population}"
    return f"{number(gain.mean)} dB ({interval}{_allowing(gain.compared)})"


def _allowing(compared: int) -> str:
    return f", allowing for the best of {compared}" if compared > 1 else ""


def certificate_sentence(rows: Sequence[LeaderboardRow]) -> str | None:
    """Words of how many images an attacker knows that its answer is right, without any truth."""
    stated = [row for row in rows if row.certificates and row.certificates.certified is not None]
    if not stated:
        return None
    best = max(stated, key=_certified_share)
    told = best.certificates
    assert told is not None
    parts = [
        word
        for word, name in (("features", "feature_cosine"), ("labels", "label_accuracy"))
        if best.metrics[name]
    ]
    what = f" ({' and '.join(parts)})" if parts else ""
    text = (
        f"certified {told.certified} of {number_of(told.images, 'image')}{what} by "
        f"{best.attack_on}, batch size {best.batch_size}"
    )
    if told.false:
        return f"{text}; false certificates among them: {told.false}"
    if not told.certified:
        return f"{text}: the attacker does not know which are right"
    return f"{text}: the attacker knows that these are right"


def _certified_share(row: LeaderboardRow) -> tuple[bool, float, int]:
    """Ranks what is known: features before labels alone, then by the share of images."""
    told = row.certificates
    assert told is not None and told.certified is not None
    features = told.certified > 0 and row.metrics["feature_cosine"] is not None
    return features, told.certified / max(1, told.images), told.certified


def label_sentence(rows: Sequence[LeaderboardRow]) -> str | None:
    """Words the attack that recovered most labels beyond guessing."""
    candidates = [
        (
            not labels_fit_any_update(row),
            row.label_gain.mean if row.label_gain else summary.mean,
            summary.mean,
            row,
        )
        for row in rows
        if row.n_ok
        and row.knowledge.labels != "known"
        and (summary := row.metrics["label_accuracy"])
    ]
    if not candidates:
        return None
    informed, _, share, best = max(candidates, key=lambda entry: entry[:3])
    guessed = best.baseline["label_accuracy"]
    summary = best.metrics["label_accuracy"]
    terms = [] if guessed is None else [f"guessing: {guessed:.0%}"]
    if summary and summary.low is not None and summary.high is not None:
        low, high = max(0.0, summary.low), min(1.0, summary.high)
        terms.append(f"{summary.confidence:.0%} interval {low:.0%} to {high:.0%} {best.population}")
    guess = f" ({', '.join(terms)})" if terms else ""
    text = (
        f"{share:.0%} of labels recovered{guess} by {best.attack_on}, batch size {best.batch_size}"
    )
    if best.no_control:
        text += f" ({best.no_control})"
    elif not informed:
        text += f", and no more than with {best.other}"
    return f"{text}, n = {number_of(best.n, 'trial')}"


def accuracy_sentence(row: LeaderboardRow, undefended: LeaderboardRow | None) -> str:
    """Words the model's accuracy, and its distance from the undefended one."""
    if row.test_accuracy is None and row.subject == "rows" and row.test_loss is not None:
        return f"test loss {row.test_loss:.3g}"
    if row.test_accuracy is None:
        return "test accuracy not measured"
    text = f"accuracy {row.accuracy}" if row.accuracy else f"{row.test_accuracy:.1%} test accuracy"
    if row.undefended or undefended is None or undefended.test_accuracy is None:
        return text
    if undefended.learning_problem:
        return f"{text}, compared with nothing, for the model without defense learned nothing"
    points = 100 * (row.test_accuracy - undefended.test_accuracy)
    if abs(points) < 0.05:
        return f"{text}, the same as without defense"
    text += f", {abs(points):.1f} points {'above' if points > 0 else 'below'} no defense"
    if row.accuracy and undefended.accuracy and row.accuracy.overlaps(undefended.accuracy):
        text += f", which {number_of(row.accuracy.examples, 'test example')} cannot tell apart"
    return text


def unstated_terms(row: LeaderboardRow) -> list[str]:
    """Names what a finite ε cannot be read without and the results do not say."""
    terms = {"δ": row.delta, "its unit": row.unit, "its neighbours": row.relation}
    return [name for name, value in terms.items() if value is None]


def privacy_claim(row: LeaderboardRow) -> str:
    """Words the stack's guarantee, with its unit, and what the audit found."""
    if row.epsilon is None:
        return "privacy not accounted"
    if math.isinf(row.epsilon):
        reason = f": {row.privacy_reason}" if row.privacy_reason else ""
        return f"no guarantee (ε = ∞{reason})"
    if missing := unstated_terms(row):
        return (
            f"a guarantee that does not state {' and '.join(missing)}, so that its ε says nothing"
        )
    text = f"ε = {format_epsilon(row.epsilon)} at δ = {format_delta(row.delta or 0.0)}"
    text += f" per {row.unit}"
    details = [row.relation.replace("_", " ") if row.relation else None, row.accountant]
    if row.relation in NO_DIFFERENTIAL_PRIVACY:
        details.append("no differential privacy")
    if row.privacy_covers:
        details.append(row.privacy_covers)
    qualifiers = ", ".join(f"{detail}" for detail in details if detail)
    text += f" ({qualifiers})" if qualifiers else ""
    if row.audited_epsilon is not None:
        text += f"; an audit found at least ε = {format_bound(row.audited_epsilon)}"
    return text


def cautions(rows: Sequence[LeaderboardRow], strongest: LeaderboardRow) -> list[str]:
    """Lists what a reader must know before trusting the verdict on `strongest`."""
    learning = strongest.learning_problem
    problems = [f"{learning[0].upper()}{learning[1:]}."] if learning else []
    if strongest.n == 1:
        problems.append("One trial only: no interval can be given.")
    elif strongest.independent == strongest.n < LEAST:
        problems.append(
            f"{number_of(strongest.n, 'trial')} only: no interval is given of fewer than {LEAST}."
        )
    elif strongest.gain and strongest.gain.n >= LEAST and strongest.gain.low is None:
        problems.append(
            f"All of {number_of(strongest.gain.n, 'trial')} gained the same: no interval is given "
            "of equal values, which says nothing of what is rare."
        )
    if strongest.independent < strongest.n:
        problems.append(
            f"Of {number_of(strongest.n, 'trial')} some share images: they count as "
            f"{number_of(strongest.independent, 'independent trial')}, and no interval is given "
            f"of fewer than {LEAST}."
        )
    failed = sum(row.n - row.n_ok for row in rows)
    if failed:
        total = sum(row.n for row in rows)
        problems.append(
            f"{failed} of {number_of(total, 'attack run')} failed; each counts as guessing."
        )
    if strongest.diverged:
        problems.append(
            f"In {strongest.diverged} of {number_of(strongest.n, 'recording')} local training "
            "more than doubles the loss of its own images: it diverges, and what it leaks says "
            "little of training that works. Lower the learning rate, or plant smaller weights."
        )
    if strongest.guess_problem:
        problems.append(f"{strongest.guess_problem[0].upper()}{strongest.guess_problem[1:]}.")
    made = "pictures" if strongest.subject == "images" else "rows"
    if strongest.no_control:
        problems.append(
            f"{strongest.no_control[0].upper()}{strongest.no_control[1:]}; what the attack knew "
            "beforehand is not told from what it read off the update."
        )
    if strongest.gain is not None and strongest.gain.mean > 0:
        other = strongest.over_other
        if other is not None and other.certain <= 0:
            problems.append(
                f"Against {strongest.other} the same attack scores as well "
                f"({format_signed(other.mean)} dB): its {made} may be what it knew beforehand."
            )
    if strongest.epsilon is not None and WEAK_EPSILON <= strongest.epsilon < math.inf:
        problems.append(
            f"An ε of {format_epsilon(strongest.epsilon)} promises next to nothing: the odds of "
            "any conclusion may change by a factor of exp(ε)."
        )
    audited = strongest.audited_epsilon
    if audited is not None and strongest.epsilon is not None and audited > strongest.epsilon:
        problems.append(
            "The audit refutes the privacy claim: its lower bound is above the claimed ε."
        )
    return problems
