"""Words judgements, by tables of messages: what terminal, page, dossier and JSON print."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

from fedsim.contracts.target import METRICS, ranking_targets, targets
from fedsim.report.figures import format_number, format_signed, read_texts
from fedsim.report.judge import (
    LARGEST_DELTA,
    Control,
    Failure,
    Judgement,
    Leaking,
    Reliance,
    Shown,
    Statement,
    Verdict,
    failures_of,
    is_leak,
    missing_terms,
    positive_controls,
    targets_by_mean,
)
from fedsim.report.row import OTHERS, Comparison, LeaderboardRow, by_comparison, heading_of
from fedsim.report.threat import describe_attacker, describe_comparison
from fedsim.scoring import Summary
from fedsim.words import (
    NO_DIFFERENTIAL_PRIVACY,
    format_bound,
    format_delta,
    format_epsilon,
    in_trials,
    join,
    number_of,
)

_TEXTS = read_texts()
STATEMENTS: Mapping[str, str] = _TEXTS["statements"]
RELIANCES: Mapping[Reliance, str] = _TEXTS["reliances"]
_NOUNS: Mapping[Leaking, str] = _TEXTS["nouns"]

_FEW = 3
"""Largest number of rounds that are listed by number."""


class _Messages(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        """Returns `value` as `format_spec` asks: a name of `_FORMATS`, `count NOUN` or `number`."""
        name, _, argument = format_spec.partition(" ")
        if name == "count":
            return number_of(value, argument)
        if name == "number":
            return format_number(value, int(argument))
        known = _FORMATS.get(name)
        return known(value) if known else super().format_field(value, format_spec)


def _words_of_failures(failures: Iterable[Failure]) -> str:
    return "; ".join(map(_describe_failure, failures))


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "signed": format_signed,
    "percent": lambda value: f"{value:.0%}",
    "epsilon": format_epsilon,
    "delta": format_delta,
    "other": lambda kind: OTHERS.get(kind, "another update"),
    "failures": _words_of_failures,
    "terms": lambda terms: join(_TEXTS["claim_terms"][term] for term in terms),
    "rounds": lambda values: join(values) if len(values) <= _FEW else "those attacked",
}

_FORMATTER = _Messages()


def _fill(message: str, **values: Any) -> str:
    return _FORMATTER.vformat(message, (), values)


def describe_statement(statement: Statement) -> str:
    """Words one statement, a clause without a stop; a wrong `kind` or missing value: KeyError."""
    kind = statement.kind
    message = STATEMENTS.get(kind) or targets()[kind.removeprefix("untried ")].noun
    return _fill(message, **statement.values, LARGEST_DELTA=LARGEST_DELTA)


def sentence(verdict: Verdict) -> str:
    """Words a verdict in one sentence: who gets what, evidence, costs, guarantee and reliance."""
    if verdict.finding == "no answer":
        labels = _standing_labels(verdict)
        return f"{_lead(verdict)}: {labels + '; ' if labels else ''}{_reason(verdict)}."
    evidence = _describe_evidence(verdict)
    parts = (_describe_costs(verdict), _describe_guarantee(verdict), _describe_reliance(verdict))
    return f"{_lead(verdict)}{f': {evidence}' if evidence else ''}; {'; '.join(parts)}."


def _standing_labels(verdict: Verdict) -> str:
    return _describe_shown(verdict.told["labels"]) if verdict.labels_stand else ""


def _lead(verdict: Verdict) -> str:
    where = "Without a defense" if verdict.undefended else f"Behind {verdict.defense}"
    if verdict.finding == "no answer" and verdict.labels_stand:
        return f"{where}, labels are recovered; of their inputs nothing can be said"
    untold = verdict.finding == "unknown" and not verdict.told
    if untold or verdict.finding in ("failed", "no answer"):
        return f"{where}, {_describe_gets(verdict)}"
    row = verdict.strongest
    attacker = describe_attacker(row.threat, row.vantage, masked=row.masked)
    return f"{where}, {attacker} gets {_describe_gets(verdict)}"


def brief(verdict: Verdict) -> str:
    """Words a verdict in one short sentence: who gets what, and whether to rely on the defense."""
    if verdict.finding == "no answer":
        return f"{_lead(verdict)}: {_reason(verdict)}."
    shown = [each for what, each in verdict.told.items() if verdict.finding in (what, "unknown")]
    answers = ", ".join(filter(None, map(_describe_answer, shown)))
    return f"{_lead(verdict)}{answers and ': '}{answers}; {_describe_reliance(verdict)}."


def grounds(verdict: Verdict) -> list[tuple[str, str]]:
    """Returns (heading, words) of evidence, certificates, costs and ε of a verdict, where known."""
    # A certificate needs no control: the attacker has it before anybody scores.
    knows = ("It knows", _describe_certificates(verdict.certificates))
    if verdict.finding == "no answer":
        labels = _standing_labels(verdict)
        named = [("Shown by", labels), knows]
    else:
        costs, promise = _describe_costs(verdict), _describe_guarantee(verdict)
        shown = ("Shown by", _describe_evidence(verdict))
        named = [shown, knows, ("It costs", costs), ("It promises", promise)]
    return [(name, text) for name, text in named if text]


def describe_told(verdict: Verdict) -> list[str]:
    """Words, in a clause each, how well attacks told labels, members and others of `told`."""
    return [_describe_shown(shown) for shown in verdict.told.values()]


def _describe_gets(verdict: Verdict) -> str:
    row, finding = verdict.strongest, verdict.finding
    times = "at times" if verdict.is_rare else "on average"
    if verdict.leaking and verdict.leaking.count:
        times = in_trials(verdict.leaking.count, verdict.leaking.n)
    kind = "told nothing" if finding == "unknown" and verdict.told else finding
    about = "" if verdict.gain else _join_nouns(verdict.may_leak)
    gets = _fill(
        _TEXTS["gets"].get(kind) or _noun(finding),
        told=_join_nouns(verdict.told),
        about=about and f"about {about} ",
        pictures="pictures" if row.main.pictured else row.main.noun,
        colors="colors" if row.main.pictured else "coarse values",
        certain="" if verdict.is_bounded else "certain ",
        times=times,
        subject=row.main.noun,
        total=verdict.trials,
    )
    if counted := verdict.times:
        least = f"in at least {counted.count} of {number_of(counted.n, 'trial')}"
        gets += f" {least if counted.or_more else in_trials(counted.count, counted.n)}"
    if not is_leak(finding):
        return gets
    if finding == "colors only" and not verdict.besides:
        return f"{gets} only"
    return join([gets, *map(_noun, verdict.besides)])


def _noun(what: Leaking) -> str:
    return _NOUNS.get(what) or targets()[what].noun


def _join_nouns(parts: Iterable[Leaking]) -> str:
    return join(nouns) if (nouns := [*map(_noun, parts)]) else ""


def _describe_reliance(verdict: Verdict) -> str:
    return RELIANCES[verdict.reliance].format(reason=_reason(verdict))


def _reason(verdict: Verdict) -> str:
    return describe_statement(verdict.reason)


def describe_cautions(judged: Verdict | Judgement) -> list[str]:
    """Words, in a sentence each, what weakens a verdict, or all verdicts of a judgement alike."""
    if isinstance(judged, Judgement):
        first, *others = map(describe_cautions, judged.verdicts)
        return [text for text in first if all(text in other for other in others)]
    clauses = [*judged.strongest.warnings, *map(describe_statement, judged.cautions)]
    return [f"{text[:1].upper()}{text[1:]}." for text in clauses]


def describe_untried(judged: Verdict | Judgement) -> list[str]:
    """Names what no attack tried on a verdict's defense, or on any of a judgement's defenses."""
    return [describe_statement(each) for each in judged.untried]


def _describe_evidence(verdict: Verdict) -> str:
    """Words the figures behind a finding; empty where it is `failed` or `no answer`."""
    row, finding, leaking = verdict.strongest, verdict.finding, verdict.leaking
    if finding == "unknown":
        return ", ".join(describe_told(verdict))
    if finding in ("failed", "no answer"):
        return ""
    others = [text for text in _other_evidence(verdict) if text]
    errors = _describe_errors(row)
    if verdict.gain is None and not errors:
        return ", ".join(others)
    figure = _describe_gain(verdict) if verdict.gain else errors[0]
    trials = f"n = {number_of(row.n, 'trial')}"
    parts = [
        f"{figure} by {row.attack_on} at batch size {row.batch_size}",
        trials if row.independent == row.n else f"{trials}, {row.independent} independent",
        *_describe_likeness(row),
    ]
    if leaking and leaking.count and (finding == "some trials" or verdict.times):
        parts.append(
            f"{leaking.count} of {leaking.n} with {row.main.leaks:g} dB or more (interval of that "
            f"share {100 * leaking.low:.0f} to {leaking.high:.0%} {row.population})"
        )
    if verdict.exposed_image and verdict.times:
        parts.append(f"the best image at {verdict.exposed_image:.1f} dB PSNR")
    attempts = verdict.gain.compared if verdict.gain else 1
    if attempts > 1:
        attacks = number_of(verdict.attacks, "attack")
        parts.append(f"the best of {attempts} attempts with {attacks}")
    if row.no_control:
        parts.append(row.no_control)
    return ", ".join([*others, *parts])


def _other_evidence(verdict: Verdict) -> list[str]:
    finding, shown = verdict.finding, []
    if finding in targets_by_mean():
        if verdict.features:
            row = verdict.features.row
            shown = [f"{text} by {row.attack_on}" for text in _describe_errors(row)]
        shown.append(_describe_certificates(verdict.certificates))
    chosen = [what for what in verdict.may_leak if finding in (what, "some trials")]
    return [*shown, *(_describe_shown(verdict.told[what]) for what in chosen)]


def _describe_gain(verdict: Verdict) -> str:
    row, gain = verdict.strongest, verdict.gain
    assert gain is not None
    what = f"over guessing and {row.other}" if row.is_uninformed else "over guessing"
    text = f"{format_signed(gain.mean)} dB {what}"
    return text + _describe_interval(gain, "{} to {} dB", format_signed, row)


def _describe_errors(row: LeaderboardRow) -> list[str]:
    """Words the errors that are judged by their means, beside the guess's."""
    texts = []
    for target in targets_by_mean().values():
        if error := row.metrics[target.ranking.name]:
            text = f"{heading_of(target.ranking)} error {error.mean:.2f}"
            text += f" (guess {row.guess_of(target.ranking.name):.2f})"
            texts.append(
                text
                + _describe_interval(error, "{} to {}", lambda end: f"{max(0.0, end):.2f}", row)
            )
    return texts


def _describe_interval(
    summary: Summary, form: str, write: Callable[[float], str], row: LeaderboardRow
) -> str:
    if summary.low is None or summary.high is None:
        return " (no interval)"
    ends = form.format(write(summary.low), write(summary.high))
    return f", {summary.confidence:.0%} interval {ends} {row.population}"


def _describe_likeness(row: LeaderboardRow) -> list[str]:
    """Words the likeness by which pictures are judged, beside the guess's."""
    parts = []
    for place, name in enumerate((*row.main.likeness, *row.main.agreement)):
        mean, guess = row.metrics[name], row.baseline[name]
        if mean and (place == 0 or name in row.likeness or name in row.main.agreement):
            beside = "" if guess is None else f" (guess {guess:.2f})"
            parts.append(f"{METRICS[name].heading} {mean.mean:.2f}{beside}")
    return parts


def _describe_shown(shown: Shown) -> str:
    row, metric, summary = shown.row, METRICS[shown.metric], shown.row.metrics[shown.metric]
    assert summary is not None
    guess = row.baseline[metric.name] if metric.uninformed is None else metric.uninformed
    form = "{:.0%}" if metric.shown_as == "percent" else "{:.2f}"
    terms = [] if guess is None else [f"guessing: {form.format(guess)}"]
    if summary.low is not None and summary.high is not None:
        low, high = summary.low, summary.high
        if metric.unit == "share":
            low, high = max(0.0, low), min(1.0, high)
        ends = f"{form.format(low)} to {form.format(high)}"
        terms.append(f"{summary.confidence:.0%} interval {ends} {row.population}")
    text = _fill(
        _TEXTS["told"].get(metric.name, f"{metric.heading or metric.name} {{value}}{{beside}}"),
        value=form.format(summary.mean),
        beside=f" ({', '.join(terms)})" if terms else "",
    )
    text += f" by {row.attack_on}, batch size {row.batch_size}"
    if row.no_control:
        text += f" ({row.no_control})"
    elif not shown.is_informed:
        text += f", and no more than with {row.other}"
    text += f", n = {number_of(row.n, 'trial')}"
    if answer := _describe_answer(shown):
        text += f": {answer}"
    limit = row.limit(metric.name)
    return text if limit is None else f"{text}; the privacy claim allows at most {limit:.2f}"


def _describe_answer(shown: Shown) -> str:
    """Words what an attack's answers come to in shares of members or records; empty if nothing."""
    row = shown.row
    names = {metric.name for metric in ranking_targets()[shown.metric].metrics}
    for name, message in _TEXTS["answers"].items():
        summary = row.metrics.get(name) if name in names else None
        if summary is None:
            continue
        ends = [summary.low, summary.high]
        if summary.low is None:
            own = (row.metrics.get(f"{name}_{end}") for end in ("low", "high"))
            ends = [each.mean if each else None for each in own]
        low, high = (None if end is None else min(max(end, 0.0), 1.0) for end in ends)
        shown_own = summary.low is None and low is not None
        guess = row.baseline.get(name)
        return _fill(
            message,
            value=_format_share(summary.mean),
            interval=""
            if low is None or high is None
            else f" ({_format_share(low)} to {_format_share(high)})",
            given=", its threshold taken as exact" if shown_own else "",
            guess="not measured" if guess is None else _format_share(guess),
        )
    return ""


def _format_share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _describe_certificates(shown: Shown | None) -> str:
    """Words of how many images an attacker knows that its answer is right; empty for None."""
    stated = shown and shown.row.certificates
    if not shown or not stated:
        return ""
    names = {"features": "feature_cosine", "labels": "label_accuracy"}
    parts = [word for word, name in names.items() if shown.row.metrics[name]]
    what = f" ({' and '.join(parts)})" if parts else ""
    text = (
        f"certified {stated.certified} of {number_of(stated.images, 'image')}{what} by "
        f"{shown.row.attack_on}, batch size {shown.row.batch_size}"
    )
    if stated.false:
        return f"{text}; false certificates among them: {stated.false}"
    known = "knows that these are right" if stated.certified else "does not know which are right"
    return f"{text}: the attacker {known}"


def _describe_costs(verdict: Verdict) -> str:
    costs = verdict.costs
    text = _describe_accuracy(verdict)
    if costs.seconds is None:
        return f"{text}, seconds of a round not recorded"
    own = _format_seconds(costs.seconds)
    text += f", {own} s a round"
    if costs.usual_seconds is None:
        return text
    usual = _format_seconds(costs.usual_seconds)
    return text + (", as without defense" if usual == own else f" instead of {usual} s")


def _describe_accuracy(verdict: Verdict) -> str:
    costs, row = verdict.costs, verdict.strongest
    if row.test_accuracy is None:
        if not row.main.pictured and row.test_loss is not None:
            return f"test loss {row.test_loss:.3g}"
        return "test accuracy not measured"
    plain = f"{row.test_accuracy:.1%} test accuracy"
    text = f"accuracy {row.accuracy}" if row.accuracy else plain
    if not costs.is_measured:
        return f"{text}, compared with nothing, for the model without defense learned nothing"
    if costs.points is None:
        return text
    if abs(costs.points) < 0.05:
        return f"{text}, the same as without defense"
    where = "above" if costs.points > 0 else "below"
    text += f", {abs(costs.points):.1f} points {where} no defense"
    if not costs.is_apart and row.accuracy:
        examples = number_of(row.accuracy.examples, "test example")
        text += f", which {examples} cannot tell apart"
    return text


def _format_seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"


def _describe_guarantee(verdict: Verdict) -> str:
    row = verdict.strongest
    parts = [_describe_proven(row)]
    if row.claimed_epsilon is not None:
        parts.append(f"its settings state ε = {format_epsilon(row.claimed_epsilon)}")
    if row.audited_epsilon is not None:
        parts.append(f"an audit found at least ε = {format_bound(row.audited_epsilon)}")
    return "; ".join(parts)


def _describe_proven(row: LeaderboardRow) -> str:
    if row.epsilon is None:
        return "privacy not accounted"
    if math.isinf(row.epsilon):
        reason = f": {row.privacy_reason}" if row.privacy_reason else ""
        return f"no guarantee (ε = ∞{reason})"
    if missing := missing_terms(row):
        terms = _fill("{terms:terms}", terms=missing)
        return f"a guarantee that does not state {terms}, so that its ε says nothing"
    details = [row.relation.replace("_", " ") if row.relation else None, row.accountant]
    if row.relation in NO_DIFFERENTIAL_PRIVACY:
        details.append("no differential privacy")
    details.append(row.privacy_covers)
    stated = f"ε = {format_epsilon(row.epsilon)} at δ = {format_delta(row.delta or 0.0)}"
    return f"{stated} per {row.unit} ({', '.join(filter(None, details))})"


def describe_control(control: Control) -> str:
    """Words what the positive control shows, or why it does not pass."""
    if not control.ended and control.status != "passed":
        return STATEMENTS["not ended"]
    if control.status == "absent":
        return str(_TEXTS["absent"])
    if control.status == "broken":
        broken = STATEMENTS["attacks broken"].removeprefix("INVALID, for ")
        return _fill(broken, failures=control.failures)
    row, due = control.best, ""
    if row and control.due is not None:
        due = f", of which {format_number(control.due, 1)} dB over {row.other}"
    values = {
        "size": control.batch_size,
        "attack": row.attack if row else "",
        "value": control.value,
        "required": control.required,
        "uncontrolled": f" ({row.no_control})" if row and row.no_control else "",
        "due": due,
        "subject": targets()[control.subject].noun,
    }
    if control.metric:
        values["heading"] = heading_of(METRICS[control.metric])
    texts = _TEXTS["controls"].get(control.metric or "nothing", _TEXTS["controls"]["other"])
    measured, required = (_fill(text, **values) for text in texts)
    if control.status == "passed":
        return measured
    if control.required is not None and control.required < 0:  # of an error, which has no less
        return f"{measured}{_TEXTS['unbeatable']}"
    lesson = _TEXTS["lessons"]["alone" if control.is_alone else "defended"]
    # Attacks on what a whole training tells have no batch to choose, and few have iterations.
    decides = ranking_targets().get(control.metric or "")
    told = decides and decides.works is not None and not decides.itemwise
    by_rounds = told and row and "update" in row.main.payloads
    remedy = _TEXTS["try rounds" if by_rounds else "try"]
    failed = f"{measured}, where {required}: {lesson}{remedy}"
    if control.is_blind:
        failed = f"{measured}{_TEXTS['uninformed']}{remedy}"
    besides = _words_of_failures(control.failures)
    return f"{failed}; besides, {besides}" if besides else failed


def _describe_failure(failure: Failure) -> str:
    return (
        f"{failure.attack} failed in {failure.count} of {number_of(failure.n, 'trial')} on "
        f"{', '.join(failure.defenses)}: {failure.reason}"
    )


def invalid_comparisons(rows: Sequence[LeaderboardRow]) -> dict[Comparison, str]:
    """Returns comparison -> reason for each comparison from which nothing follows."""
    return {
        control.comparison: describe_control(control) if control.ended else STATEMENTS["not ended"]
        for control in positive_controls(rows)
        if control.mark
    }


def invalid_reasons(rows: Sequence[LeaderboardRow], *, unended: bool = True) -> list[str]:
    """Returns why comparisons among `rows` prove nothing; empty if every control passed.

    Without rows, that is the one reason. `unended`: whether runs count that have not ended.
    """
    if not rows:
        return ["no positive control: there are no results"]
    judged = [row.comparison for row in rows if unended or row.ended]
    shown = {row.comparison for row in rows}
    return [
        f"{describe_comparison(comparison, shown)}: {reason}" if len(shown) > 1 else reason
        for comparison, reason in invalid_comparisons(rows).items()
        if comparison in judged
    ]


def warnings(rows: Sequence[LeaderboardRow]) -> list[str]:
    """Returns lines on poor models, failed attacks, poor guesses and missing controls of `rows`."""
    groups = by_comparison(rows)
    lines: dict[str, None] = {}
    for comparison, members in groups.items():
        where = f"{describe_comparison(comparison, groups)}, " if len(groups) > 1 else ""
        lines |= dict.fromkeys(f"{where}{line}" for line in _warnings_of(members))
    return list(lines)


def _warnings_of(rows: Sequence[LeaderboardRow]) -> list[str]:
    lines = [f"{row.defense}: {problem}" for row in rows if (problem := row.learning_problem)]
    lines += map(_describe_failure, failures_of(rows))
    poor = [row for row in rows if row.guess_problem]
    if poor:
        worst = min(poor, key=lambda row: (-row.near_copies, row.guess_public_per_image or 0.0))
        sizes = ", ".join(map(str, sorted({row.batch_size for row in poor})))
        lines.append(f"batch size {sizes}, at worst: {worst.guess_problem}")
    alone = [row for row in rows if row.ended and row.control_problem]
    for reason in dict.fromkeys(row.no_control for row in alone):
        attacks = dict.fromkeys(row.attack for row in alone if row.no_control == reason)
        lines.append(f"{', '.join(attacks)}: {reason}{_TEXTS['no_control']}")
    return lines
