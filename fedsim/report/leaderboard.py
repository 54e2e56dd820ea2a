"""The leaderboard: a projection of results rows, one line per attack on a defense."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim.report.figures import describe_stack
from fedsim.report.row import Certificates, LeaderboardRow
from fedsim.report.threat import threat_model_of
from fedsim.results.lines import ClaimOf, ControlKind, Metrics, ResultRow, RoundRow, UtilityOf
from fedsim.results.reading import load_runs, measurements
from fedsim.scoring import METRICS, Accuracy, Summary, accuracy, share, summarize
from fedsim.targets.images import EXPOSED_IMAGE
from fedsim.words import describe_variant


def gains(rows: Sequence[ResultRow], name: str) -> list[float] | None:
    """Returns each row's gain over its guess in the metric `name`, in the metric's unit.

    It is positive where the answer leaks more, also of errors, and 0 for a row without an answer.
    The result is None if no row has a guess, or an answer has none beside it. So it is if a metric
    that needs no guess has no value, as membership where all took part.
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


def _own_gains(rows: Sequence[ResultRow], name: str = "psnr") -> list[float | None] | None:
    """Returns the lesser of each row's gains over guess and another update; None as `gains` has."""
    gained = gains(rows, name)
    if gained is None:
        return None
    overs = over_other(rows, name)
    # Where only some rows have another update, nothing is known of an answer without one.
    partial = any(over is not None for over in overs)
    return [
        min(gain, over) if over is not None else None if partial and row.ok else gain
        for row, gain, over in zip(rows, gained, overs, strict=True)
    ]


def _due_gains(rows: Sequence[ResultRow], name: str = "psnr") -> list[float | None] | None:
    """Returns the part of each row's gain that counts: its own, where a control can tell that."""
    # Another batch of the same client cannot: then the whole gain of each row counts.
    if any(row.control and row.control.of == "batch" and row.other_update for row in rows):
        return None if (whole := gains(rows, name)) is None else [*whole]
    return _own_gains(rows, name)


def _image_gains(row: ResultRow) -> list[tuple[float, float]]:
    """Returns (PSNR, gain in dB over guess and other update) of each image that has a control."""
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
    # Rows say these of no single image, and means only if the whole trial is better than both.
    if min(own - guess, own - other) <= 0:
        return []
    return [(value, value - guess - _WITHIN) for value in values]


_WITHIN = 14.0
"""Where no guess is known of an image by itself, its gain over the trial's mean guess counts for so
many dB less: guesses of one image exceed their own mean by that at most on the bundled data."""


def over_other(rows: Sequence[ResultRow], name: str) -> list[float | None]:
    """Returns each row's gain in metric `name` over its control; positive where the own leaks more.

    The control is the same attack's answer to another update; the gain is None without one.
    """
    gain = METRICS[name].gain
    pairs = [(value_of(row.metrics, name), value_of(row.other_update, name)) for row in rows]
    return [None if own is None or other is None else gain(own, other) for own, other in pairs]


def value_of(metrics: Metrics | None, name: str) -> float | None:
    """Returns the value of metric `name`; None if there are no metrics or it does not apply."""
    return metrics[name] if metrics else None


def count_images(rows: Sequence[ResultRow]) -> int | None:
    """Returns how many different images, or rows of a table, were attacked; None if no row says."""
    recorded = [row.victims for row in rows if row.victims is not None]
    if not recorded:
        return None
    return len({victim for victims in recorded for victim in victims})


def group_apart(rows: Sequence[ResultRow]) -> list[list[int]]:
    """Groups the indices of `rows` so that no image is in two groups; all in ascending order.

    A row on a release of a table is a group of its own.
    """
    groups: list[tuple[set[str], list[int]]] = []
    for index, row in enumerate(rows):
        # Each release of a table tosses its own coins on which rows take part.
        victims = set() if row.main.asked_singly else set(row.victims or ())
        sharing = [group for group in groups if group[0] & victims]
        groups = [group for group in groups if group not in sharing]
        members = [member for _, indices in sharing for member in indices]
        groups.append((victims.union(*(shared for shared, _ in sharing)), [*members, index]))
    return sorted(sorted(members) for _, members in groups)


def leaderboard_rows(
    folders: Iterable[Path | str], *, confidence: float = 0.95
) -> list[LeaderboardRow]:
    """Returns the leaderboard of all runs below `folders`: a row for each attack on a defense.

    Rows are sorted by comparison, defense (undefended first, then the leakiest) and attack, the
    strongest first. Intervals hold at `confidence`, between 0 and 1. A ReportError says that a
    folder holds no results, or a file is damaged.
    """
    return aggregate(measurements(load_runs(folders)), confidence=confidence)


def aggregate(rows: Sequence[ResultRow], *, confidence: float = 0.95) -> list[LeaderboardRow]:
    """Returns the leaderboard of `rows`, sorted as `leaderboard_rows` is.

    `rows` must hold each measurement once, as `measurements` does: a copy would count as a trial.
    """
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(row.cell, []).append(row)
    yielded = _find_yields(rows)
    attempts = Counter(row.defense.name for row in rows if _membership_p(row) is not None)
    lines = [
        replace(
            _aggregate(group, confidence, yielded.get(group[0].attack.name, tuple(METRICS))),
            membership_p=_corrected_p(group, attempts[group[0].defense.name]),
        )
        for group in groups.values()
    ]
    return _mark_strongest(_sort_lines(_mark_masked(lines)))


def _membership_p(row: ResultRow) -> float | None:
    return row.theory.membership_p if row.theory else None


def _corrected_p(rows: Sequence[ResultRow], attempts: int) -> float | None:
    """Returns the least p-value of the claim among `rows`, corrected for `attempts` on it."""
    found = [p for row in rows if (p := _membership_p(row)) is not None]
    return min(1.0, attempts * min(found)) if found else None


def _sort_lines(lines: list[LeaderboardRow]) -> list[LeaderboardRow]:
    """Sorts undefended rows first, then the leakiest defense, and its strongest attack first."""
    read = dict.fromkeys(line.comparison for line in lines)
    usual = sorted(read, key=lambda key: (key[-2], key[-1] != "server"))
    order = {key: i for i, key in enumerate(usual)}
    leak: dict[tuple[object, ...], tuple[float, ...]] = {}  # standing of the strongest attack
    for line in lines:
        key = (*line.comparison, line.defense)
        leak[key] = max(leak.get(key, line.standing), line.standing)

    def rank(line: LeaderboardRow) -> tuple[object, ...]:
        leaked = leak[(*line.comparison, line.defense)]
        return (
            order[line.comparison],
            not line.undefended,
            tuple(-value for value in leaked),
            line.defense,
            tuple(-value for value in line.standing),
            line.attack,
            line.batch_size,
            line.round,
        )

    return sorted(lines, key=rank)


def _mark_masked(lines: list[LeaderboardRow]) -> list[LeaderboardRow]:
    """Marks single updates of defenses that show sums, too: they are masked vectors."""

    def key(line: LeaderboardRow) -> tuple[str, ...]:
        return (line.scenario, line.variant, line.dataset, line.model, line.defense)

    summed = {key(line) for line in lines if line.vantage == "aggregate"}
    alone = ("server", "eavesdropper")
    return [replace(line, masked=line.vantage in alone and key(line) in summed) for line in lines]


def _mark_strongest(lines: list[LeaderboardRow]) -> list[LeaderboardRow]:
    """Marks the first line of each defense, if its attack works and is informed by the update."""
    ranked: set[tuple[object, ...]] = set()
    marked = []
    for line in lines:
        key = (*line.comparison, line.defense)
        works = line.n_ok > 0 and not line.is_uninformed
        compared = line.ended or line.no_control is None
        marked.append(replace(line, strongest=key not in ranked and works and compared))
        ranked.add(key)
    return marked


def _find_yields(rows: Sequence[ResultRow]) -> dict[str, tuple[str, ...]]:
    """Maps each attack to the metrics of which any of its trials has a value."""
    yields: dict[str, tuple[str, ...]] = {}
    for row in rows:
        if row.ok:
            recovered = {name for name in METRICS if value_of(row.metrics, name) is not None}
            recovered |= set(yields.get(row.attack.name, ()))
            yields[row.attack.name] = tuple(name for name in METRICS if name in recovered)
    return yields


def _aggregate(rows: list[ResultRow], confidence: float, yielded: Sequence[str]) -> LeaderboardRow:
    """Aggregates the trials of one cell; `yielded` are the metrics that its attack can recover."""
    first, trials = rows[0], group_apart(rows)

    def measured(values: Sequence[float | None] | None) -> list[float]:
        """Returns one value per independent trial: the mean over its rows that have a value."""
        present = [[v for i in unit if (v := values[i]) is not None] for unit in trials if values]
        return [sum(unit) / len(unit) for unit in present if unit]

    def summary(values: Sequence[float | None] | None) -> Summary | None:
        return summarize(measured(values), confidence=confidence)

    def measured_by(values: Callable[[str], Sequence[float | None] | None]) -> dict[str, Summary]:
        found = {name: summary(values(name)) for name in METRICS}
        return {name: each for name, each in found.items() if each is not None}

    # A metric that the attack does not answer has no value, not that of a guess.
    values = {name: _count_failures(rows, name) if name in yielded else None for name in METRICS}
    ok = [row for row in rows if row.ok]
    alone, main = sum(row.other_update is None for row in ok), first.main
    # A leak is only what the update added: public images alone may bring a gain.
    due = _due_gains(rows, main.ranking.name) if main.ranking.name in yielded else None
    counted = measured(due)
    leaks = sum(gain >= main.leaks for gain in counted)
    return LeaderboardRow(
        cell=first.cell,
        scenario=first.scenario,
        variant=describe_variant(first.variant),
        folders=tuple(sorted({str(row.folder) for row in rows})),
        dataset=first.dataset,
        model=first.computed,
        subject=main.part,
        defense=first.defense.name,
        stack=describe_stack(first.defense.stack),
        undefended=not first.defense.stack,
        attack=first.attack.label,
        vantage=first.vantage,
        threat=threat_model_of(first),
        knowledge=first.knowledge,
        batch_size=first.batch_size,
        round=first.round,
        n=len(rows),
        n_ok=len(ok),
        images=count_images(rows),
        independent=len(trials),
        failures=dict(Counter(row.reason or "no reason given" for row in rows if not row.ok)),
        metrics={name: summary(values[name]) for name in METRICS},
        worst={name: _worst(rows, name, values[name]) for name in METRICS},
        gains=measured_by(lambda name: gains(rows, name) if name in yielded else None),
        own_gains=measured_by(lambda name: _own_gains(rows, name) if name in yielded else None),
        others=measured_by(lambda name: [value_of(row.other_update, name) for row in rows]),
        over_others=measured_by(lambda name: over_other(rows, name)),
        control=_control_of(rows),
        uncontrolled=alone if any(row.other_update for row in ok) else 0,
        exposed_image=max(
            (psnr for row in rows for psnr, gain in _image_gains(row) if gain >= EXPOSED_IMAGE),
            default=None,
        ),
        may_expose=main.ranking.name in yielded and any(_may_expose(row) for row in rows),
        ignores_update=first.attack.ignores_update,
        unaware=first.attack.blind,
        leaking=share(leaks, len(counted), confidence=confidence) if counted else None,
        no_control=_no_control(rows),
        ended=all(row.ended for row in rows),
        **_claimed(rows),
        **_stated(rows),
        accuracy=accuracy_of([r.utility for r in rows if r.utility], confidence=confidence),
        certificates=_certificates(rows),
        networks=len({row.folder for row in rows}),
        clients=len({(row.folder, row.client) for row in rows}),
        recognizable=_recognizable(rows, due),
    )


def _stated(rows: list[ResultRow]) -> dict[str, Any]:
    guesses = [row.baseline for row in rows if row.baseline]
    return {
        "baseline": {
            name: _mean([value for each in guesses if (value := each[name]) is not None])
            for name in METRICS
        },
        "guess_public": min(_list_stated(rows, "baseline", "public"), default=None),
        "guess_public_per_image": min(
            _list_stated(rows, "baseline", "public_per_image"), default=None
        ),
        # Images that public ones nearly show are no leak of the update.
        "near_copies": sum(_list_stated(rows, "baseline", "near_copies")),
        **{name: _mean(_list_stated(rows, "utility", name)) for name in _MEASURED},
        "diverged": sum(_list_stated(rows, "utility", "diverged")),
        "seconds": _mean(_list_stated(rows, "cost", "seconds")),
        **{name: _mean(_list_stated(rows, "theory", name)) for name in _PREDICTED},
        **{name: next(iter(_list_stated(rows, "theory", name)), None) for name in _EXPLAINED},
        "limits": {
            name: limit
            for name in METRICS
            if (limit := _mean(_list_stated(rows, "theory", name))) is not None
        },
    }


_MEASURED = ("train_loss", "test_loss", "test_accuracy")
_PREDICTED = ("tensor_rate", "tensor_bound")
_EXPLAINED = ("tensor_bound_reason", "limit_prior", "limit_reason")


def _list_stated(rows: list[ResultRow], part: str, name: str) -> list[Any]:
    """Returns the values of a field of a `part` of the rows, such as `cost`, without None."""
    values = (getattr(getattr(row, part), name, None) for row in rows)
    return [value for value in values if value is not None]


def _control_of(rows: Sequence[ResultRow]) -> ControlKind | None:
    """Returns what the weakest control of `rows` is of."""
    kinds = {row.control.of for row in rows if row.control and row.other_update}
    weakest: tuple[ControlKind, ...] = ("batch", "public", "client", "release")
    return next((kind for kind in weakest if kind in kinds), None)


def _may_expose(row: ResultRow) -> bool:
    """Whether one trial shows what its mean hides, for all that is known."""
    main = row.main
    if main.exposes is not None and any(gain >= main.exposes for _, gain in _image_gains(row)):
        return True
    decided = row.other_update and not (row.control and row.control.of == "batch")
    gain = gains([row], main.ranking.name) if row.ok and not decided else None
    if gain and gain[0] >= main.leaks:  # nothing tells whether it was read off the update
        return True
    is_alike = row.ok and main.is_alike(_values_of(row), main.likeness)
    return is_alike and any(
        value is not None and value >= main.likeness_gain
        for name in main.likeness
        for value in _due_gains([row], name) or []
    )


def _values_of(row: ResultRow) -> dict[str, float | None]:
    return {name: value_of(row.metrics, name) for name in METRICS}


def _certificates(rows: Sequence[ResultRow]) -> Certificates | None:
    stated = [row.certificate for row in rows if row.certificate]
    if not stated:
        return None

    def total(name: str) -> int | None:
        known = [value for each in stated if (value := getattr(each, name)) is not None]
        return sum(known) if known else None

    return Certificates(
        images=sum(each.images for each in stated),
        determined=total("determined"),
        certified=total("certified"),
        false=total("false"),
    )


def _claimed(rows: Sequence[ResultRow]) -> dict[str, Any]:
    claim = _pooled_claim(rows)
    audited = [row.privacy.audited_epsilon for row in rows if row.privacy]
    return {
        "epsilon": math.inf if claim.epsilon == "inf" else claim.epsilon,
        "delta": claim.delta,
        "accountant": claim.accountant,
        "unit": claim.unit,
        "relation": claim.relation,
        "privacy_reason": claim.reason,
        "privacy_covers": claim.covers,
        "claimed_epsilon": claim.claimed_epsilon,
        "audited_epsilon": max((each for each in audited if each is not None), default=None),
    }


def _pooled_claim(rows: Sequence[ResultRow]) -> ClaimOf:
    """Returns what holds of every row: the largest ε and δ, and the terms that all share."""
    claims = [row.claimed for row in rows]
    if any(claim is None or claim.epsilon is None for claim in claims):
        return ClaimOf()
    stated = [claim for claim in claims if claim]
    weakest = max(stated, key=lambda claim: float(claim.epsilon or 0.0))
    if weakest.epsilon == "inf":
        return weakest
    deltas = [claim.delta for claim in stated if claim.delta is not None]
    changes: dict[str, Any] = {"delta": max(deltas) if len(deltas) == len(stated) else None}
    for name in ("unit", "relation", "accountant"):
        if len({getattr(claim, name) for claim in stated}) > 1:
            changes[name] = None
    return weakest.model_copy(update=changes)


def _recognizable(rows: Sequence[ResultRow], due: Sequence[float | None] | None) -> int:
    """Returns how many trials leak by their gains `due` to their update, and are recognizable."""
    return sum(
        row.ok
        and gain is not None
        and gain >= row.main.leaks
        and row.main.is_recognizable(_values_of(row))
        for row, gain in zip(rows, due or (), strict=False)
    )


def _no_control(rows: list[ResultRow]) -> str | None:
    ok = [row for row in rows if row.ok]
    if not ok or any(row.other_update for row in ok):
        return None
    if not all(row.ended for row in rows):
        return "not yet compared with another update"
    if len(rows) == 1:
        return "no control: one trial"
    return "no control: one trial worked" if len(ok) == 1 else "no control: no other images"


def _count_failures(rows: list[ResultRow], name: str) -> list[float] | None:
    """Returns one value of the metric per row; a failed row has that of its guess."""

    def value(row: ResultRow) -> float | None:
        found = value_of(row.metrics if row.ok else row.baseline, name)
        return METRICS[name].uninformed if found is None and not row.ok else found

    values = [value(row) for row in rows]
    present = [each for each in values if each is not None]
    return present if len(present) == len(rows) else None


def _worst(rows: list[ResultRow], name: str, values: list[float] | None) -> float | None:
    ok = [row for row in rows if row.ok]
    if values is None:
        values = [v for row in ok if (v := value_of(row.metrics, name)) is not None]
    images = [v for row in ok for v in (row.per_image or {}).get(name, [])]
    pick = max if METRICS[name].larger_leaks else min
    return pick([*values, *images], default=None)


def accuracy_of(
    evaluated: Sequence[UtilityOf | RoundRow], *, confidence: float = 0.95
) -> Accuracy | None:
    """Returns the mean test accuracy over runs, with the interval of the smallest test set.

    The result is None if nothing was tested, or a run does not say what it was tested on.
    """
    measured = [u for u in evaluated if u.test_accuracy is not None]
    sizes = [
        (u.test_examples, u.test_chance) for u in measured if u.test_examples and u.test_chance
    ]
    if not measured or len(sizes) < len(measured):
        return None
    share = sum(u.test_accuracy or 0.0 for u in measured) / len(measured)
    return accuracy(share, *min(sizes), confidence=confidence)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
