"""Words what was run, what went wrong, what each defense left of the model, and with what."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedsim.report.figures import format_number, format_summary
from fedsim.report.leaderboard import accuracy_of
from fedsim.report.row import LeaderboardRow
from fedsim.results.lines import PrivacyOf, RoundRow, canonical, nested
from fedsim.results.reading import StoredRun, differences, measurements
from fedsim.scoring import Accuracy, Summary, learning_problem, summarize
from fedsim.words import describe_variant, format_bound, format_claim, join, number_of


def summarize_runs(runs: Sequence[StoredRun]) -> str:
    """Returns one sentence on what was run; empty if nothing is scored yet and more is to come."""
    rows, late = measurements(runs), unfinished(runs)
    if not rows and attacks_nothing(runs):
        return (
            "Nothing is attacked in this run: it shows what each defense leaves of the model, and "
            "what is proven of it."
        )
    if not rows:
        nothing = "This run has no results: no update was recorded, or no attack was run."
        return "" if late else nothing
    clients, *others = (run.setting("data", "clients") for run in runs)
    alike = isinstance(clients, int) and all(other == clients for other in others)
    rounds = max((row.round for run in runs for row in run.rounds), default=None)
    by = f" by {number_of(clients, 'client')}" if alike else " by a federation"
    over = f" over {number_of(rounds, 'round')}" if rounds else ""
    stacks = {row.defense.name for row in rows if row.defense.stack}
    undefended = "without a defense" if any(not row.defense.stack for row in rows) else ""
    defended = f"behind {number_of(len(stacks), 'defense')}" if stacks else ""
    failed = sum(not row.ok for row in rows)
    sizes = sorted({row.batch_size for row in rows})
    updates = {(row.scenario, canonical(row.variant), row.observation) for row in rows}
    data = _join(row.dataset for row in rows)
    computation = f"{_was(row.computed for row in rows)} trained on {data}{by}{over}"
    recordings = f"{number_of(len(updates), 'recorded update')}, in batches of {_join(sizes)}"
    recordings += " image" if sizes == [1] else " images"
    if rows[0].main.asked_singly:
        computation = f"{_was(row.learner for row in rows)} computed from {data}{by}"
        recordings = f"{number_of(len(updates), 'recorded release')}, of a mean number of rows of "
        recordings += _join(sizes)
    return (
        f"{computation}, "
        f"{' and '.join(part for part in (undefended, defended) if part)}; then "
        f"{_join(row.attack.label for row in rows)} tried to recover the clients’ data from "
        f"{recordings}: "
        f"{number_of(len(rows), 'attack run')}{' so far' if late else ''}, {failed or 'none'} of "
        "which failed."
    )


def client_failures(runs: Sequence[StoredRun]) -> list[str]:
    """Returns lines on what went wrong in the federations' rounds; empty if nothing did."""
    counts: Counter[tuple[str, str]] = Counter()
    details: dict[str, None] = {}
    for run in runs:
        for row in run.rounds:
            for reason, count in row.failures.items():
                counts[(row.defense, f"updates left out: {reason.replace('_', ' ')}")] += count
            counts[(row.defense, "updates that were zero everywhere")] += row.zero_updates
            counts[(row.defense, "probes without a recording")] += row.probe_failures
            details |= {f"{row.defense}, round {row.round}: {text}": None for text in row.details}
    lines = [f"{stack}, {reason} ({count})" for (stack, reason), count in counts.items() if count]
    return standing_still(runs) + lines + list(details)


def standing_still(runs: Sequence[StoredRun]) -> list[str]:
    """Returns a line for each run and stack with rounds in which no update moved the model."""
    lines = []
    for run in runs:
        for stack in dict.fromkeys(row.defense for row in run.rounds):
            rounds = [row for row in run.rounds if row.defense == stack and row.participants]
            still = sum(row.aggregated == 0 for row in rounds)
            if still:
                lines.append(
                    f"{stack}: the model stayed as it was in {still} of "
                    f"{number_of(len(rounds), 'round')}, without any update; rounds.jsonl says why"
                )
    return list(dict.fromkeys(lines))


def notes(runs: Sequence[StoredRun]) -> list[str]:
    """Returns the notes in the runs' record.json, each text once, then the lines of `unseen`."""
    texts = [str(text) for run in runs for text in (nested(run.record, "notes") or {}).values()]
    return list(dict.fromkeys([*texts, *unseen(runs)]))


def unseen(runs: Sequence[StoredRun]) -> list[str]:
    """Returns a line for each run on whose encrypted wire an eavesdropper saw no update."""
    return [
        f"ENCRYPTED: an eavesdropper on the wire of {run.folder} saw sizes and times, and no "
        f"update; {number_of(run.unseen, 'attack run')} had nothing to attack and is in no table"
        for run in runs
        if run.unseen
    ]


def undeclared(runs: Sequence[StoredRun]) -> list[str]:
    """Returns the notes on defenses that do not declare what they do to an update, each once."""
    items = [item for run in runs for item in (nested(run.record, "notes") or {}).items()]
    return list(dict.fromkeys(str(text) for key, text in items if key.startswith("effect.")))


@dataclass(frozen=True)
class Awaited:
    """Says why none of the runs' attacks is scored yet."""

    mark: str
    """`UNSCORED` if truths are with the clients, else `UNFINISHED`."""
    reason: str
    """Clause that says so, how far the runs are, and how they go on."""


def awaited(runs: Sequence[StoredRun]) -> Awaited | None:
    """Returns why no attack is scored yet; None if some are, or if none ever will be."""
    waiting = [run for run in runs if run.unscored]
    if any(run.rows for run in runs):
        return None
    if not waiting:
        begun = [run for run in runs if not run.ended and run.plan and run.plan.attack_runs]
        reason = f"no attack is scored yet: {'; '.join(map(_describe_extent, begun))}"
        return Awaited("UNFINISHED", reason) if begun else None
    count = number_of(sum(run.unscored for run in waiting), "attack run")
    commands = " and ".join(map(_collect, waiting))
    return Awaited(
        "UNSCORED",
        "no attack is scored yet, since what the clients really used (the truth) is still with "
        f"their nodes: {count} will be made and scored once {commands} has joined it to this run",
    )


def _collect(run: StoredRun) -> str:
    """Returns the command that joins a run's truth; nodes of `fedsim up` are in its folder."""
    homes = "" if (run.folder / "nodes").is_dir() else " --from HOME (each node's folder)"
    return f"fedsim collect {run.folder}{homes}"


def unfinished(runs: Sequence[StoredRun]) -> list[str]:
    """Returns a line for each run without truth (`UNSCORED`), then each unended (`UNFINISHED`)."""
    waiting = [
        f"UNSCORED: the truth of {number_of(run.unscored, 'attack run')} of {run.folder} is with "
        f"the clients; join it with {_collect(run)}"
        for run in runs
        if run.unscored
    ]
    return waiting + [
        f"UNFINISHED: the run {_describe_extent(run)}" for run in runs if not run.ended
    ]


def _describe_extent(run: StoredRun) -> str:
    has = f"{number_of(run.attack_runs, 'attack run')} so far"
    if plan := run.plan:
        parts = [f"{run.attack_runs} of {number_of(plan.attack_runs, 'attack run')}"]
        if plan.lines:
            parts[0] += (
                f" ({len(run.lines)} of {number_of(plan.lines, 'line')} of the leaderboard begun)"
            )
        if plan.rounds:
            parts.append(f"{run.rounds_trained} of {number_of(plan.rounds, 'round')} of training")
        has = " and ".join(parts)
    return f"{run.folder} has {has}, and {_continuation(run)}"


def _continuation(run: StoredRun) -> str:
    if run.at_work:
        return "is still going"
    if run.plan and not run.plan.resumable:
        return "cannot be continued: repeat it with another --out"
    if run.record and run.is_remote:
        return f"nothing is at work in it: continue it with {_collect(run)}"
    return "nothing is at work in it: continue it with --resume"


@dataclass(frozen=True)
class Again:
    """Says how runs are repeated, by a shell `command`, and what then is the same."""

    command: str
    promise: str
    """End of the sentence that asks to run `command` with the same versions."""
    of_scenario: bool = True
    """Whether `command` runs a scenario, which has to be saved first."""


def again(runs: Sequence[StoredRun]) -> Again:
    """Returns how to repeat `runs` of one scenario, or of one recorded app."""
    if commands := {run.record["again"] for run in runs if run.record.get("again")}:
        command = " && ".join(sorted(map(str, commands)))
        return Again(command, ", in the app’s folder and on the same recording", of_scenario=False)
    same = "; on the same kind of machine it gives the same figures"
    if not any(run.is_remote for run in runs):
        return Again("fedsim run scenario.yaml", same)
    if all(run.record.get("noise_key") == "scenario" for run in runs):
        return Again("fedsim up scenario.yaml --shared-seed --out again", same)
    return Again(
        "fedsim up scenario.yaml --out again && fedsim collect again",
        "; figures will differ, since each node draws batches and noise from a secret of its own, "
        "and reads data of its own if it has any",
    )


def made_with(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, words) of the machine, versions and costs that `record` (record.json) has."""
    environment = record.get("environment")
    packages = nested(environment, "packages") or {}
    facts = {
        "commit": nested(environment, "commit"),
        "seed": record.get("seed"),
        "device": record.get("device"),
        "hardware": nested(environment, "gpu") or nested(environment, "processor"),
        "python": nested(environment, "python"),
        "packages": ", ".join(f"{k} {v}" for k, v in packages.items() if v),
        "wall time": _duration(record.get("seconds")),
        "peak memory": _megabytes(record.get("peak_memory_bytes")),
        "on the wire": _megabytes(record.get("bytes_on_wire")),
    }
    return [(key, str(value)) for key, value in facts.items() if value not in (None, "")]


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _megabytes(count: int | None) -> str | None:
    return None if count is None else f"{count / 1e6:,.0f} MB"


def _join(values: Iterable[object]) -> str:
    return join(dict.fromkeys(map(str, values)))


def _was(values: Iterable[object]) -> str:
    different = dict.fromkeys(values)
    return f"{_join(different)} {'was' if len(different) == 1 else 'were'}"


def runs_of(rows: Sequence[LeaderboardRow], runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Returns those of `runs` that `rows` of one comparison are from, or will have more from."""
    cells, scenario = {row.cell for row in rows}, rows[0].scenario
    own = [run for run in runs if any(row.cell in cells for row in run.rows)]

    def belongs(run: StoredRun) -> bool:
        if run.rows or run.setting("name") != scenario:
            return run in own
        pairs = [differences([each.scenario, run.scenario], [{}, {}]) for each in own]
        return any(not any(pair) for pair in pairs)

    return [run for run in runs if belongs(run)]


def round_seconds(runs: Sequence[StoredRun]) -> dict[str, float]:
    """Returns stack's name -> mean seconds of a round, over all runs that state them."""
    times: dict[str, list[float]] = {}
    for run in runs:
        for row in run.rounds:
            if row.seconds is not None:
                times.setdefault(row.defense, []).append(row.seconds)
    return {defense: fmean(values) for defense, values in times.items()}


_SEED = "seed"
_BESIDE = {"epsilon", "privacy", "sigma", "seconds"}
"""Fields of a round that tell nothing of whether another is its copy."""


@dataclass(frozen=True, kw_only=True)
class UtilityRow:
    """Describes stack `defense` after its last round, over runs that differ in their seed alone.

    Terms of the claim are those of the largest ε: `reason` says why it is inf, and `covers` which
    releases it is of. `audited_epsilon` is the largest lower bound by canaries. `problem` says why
    the model cannot show what the defense costs. `variant` is the swept settings in words, empty
    without a sweep. `runs` is their number. Fields are None where no run has the value.
    """

    variant: str
    defense: str
    runs: int
    epsilon: float | None
    """The largest ε of the runs; inf if nothing is proven, None if it was not accounted."""
    delta: float | None
    unit: str | None
    relation: str | None
    reason: str | None
    covers: str | None
    audited_epsilon: float | None
    sigma: float | None
    """The largest σ of the rows σ I that a client appended to its data; None without any."""
    test_loss: Summary | None
    test_accuracy: Summary | None
    """Percentage of the test data that the model classifies correctly, in [0, 100]."""
    accuracy: Accuracy | None
    """Mean test accuracy, with chance, test set's size and interval, where runs state them."""
    problem: str | None


def attacks_nothing(runs: Sequence[StoredRun]) -> bool:
    """Whether the scenario of every run declares no attack."""
    return all(run.setting("attacks") == [] for run in runs)


def utility(runs: Sequence[StoredRun]) -> list[UtilityRow]:
    """Returns a row for each variant and defense, of all seeds together, by their last rounds.

    The order is that of `runs` and their rounds. Runs of one seed whose last rounds measured the
    same count once; the largest ε and σ are of all. A defense without a round has no row.
    """
    cells: dict[tuple[str, str], list[RoundRow]] = {}
    first: dict[tuple[str, str], dict[str, RoundRow]] = {}  # of each cell, without copies
    audited: dict[tuple[str, str], list[float]] = {}
    closed: set[tuple[str, str]] = set()  # of learners that release in closed form
    for run in runs:
        variant = describe_variant({k: v for k, v in run.variant.items() if k != _SEED})
        last = {row.defense: row for row in sorted(run.rounds, key=lambda row: row.round)}
        for defense in dict.fromkeys(row.defense for row in run.rounds):
            cells.setdefault((variant, defense), []).append(last[defense])
            measured = last[defense].model_dump(exclude=_BESIDE)
            key = canonical([run.setting("seed"), run.variant, measured])
            first.setdefault((variant, defense), {}).setdefault(key, last[defense])
            if run.scenario and run.setting("model") is None:
                closed.add((variant, defense))
        for audit in run.audits:
            audited.setdefault((variant, audit.defense), []).append(audit.audited_epsilon)
    return [
        UtilityRow(
            variant=variant,
            defense=defense,
            runs=len(rows),
            **_weakest_claim(cells[variant, defense]),
            audited_epsilon=max(audited.get((variant, defense), []), default=None),
            sigma=max(
                (r.sigma for r in cells[variant, defense] if r.sigma is not None), default=None
            ),
            test_loss=summarize([r.test_loss for r in rows if r.test_loss is not None]),
            accuracy=accuracy_of(rows),
            problem=_problem(rows, trains=(variant, defense) not in closed),
            test_accuracy=summarize(
                [100 * r.test_accuracy for r in rows if r.test_accuracy is not None]
            ),
        )
        for (variant, defense), own in first.items()
        for rows in [list(own.values())]
    ]


def describe(rows: Sequence[UtilityRow]) -> str:
    """Returns text: a line on each row's ε, audit, loss and accuracy, one on its `problem`."""
    lines = []
    for row in rows:
        parts = [f"ε {format_claim(row.epsilon, row.delta, row.unit, row.relation)}"]
        parts += [row.covers] if row.covers else []
        parts += [row.reason] if row.reason else []
        if row.audited_epsilon is not None:
            parts.append(f"audit: at least {format_bound(row.audited_epsilon)}")
        if row.sigma is not None:
            parts.append(f"σ {format_number(row.sigma, 3)}")
        if row.test_loss:
            parts.append(f"test loss {format_summary(row.test_loss, 3)}")
        if row.test_accuracy:
            parts.append(f"accuracy {row.accuracy or format_summary(row.test_accuracy) + '%'}")
        name = ", ".join(filter(None, (row.variant, row.defense)))
        lines.append(f"{name}: {', '.join(parts)}")
        lines += [f"WARNING: {name}: {row.problem}"] if row.problem else []
    return "\n".join(lines)


def _problem(rows: Sequence[RoundRow], *, trains: bool) -> str | None:
    accuracy = accuracy_of(rows)
    losses = [row.test_loss for row in rows if row.test_loss is not None]
    mean = sum(losses) / len(losses) if len(losses) == len(rows) else None
    return learning_problem(accuracy, mean, trains=trains) if accuracy else None


def _weakest_claim(rows: Sequence[RoundRow]) -> dict[str, Any]:
    """Returns the largest ε of the rows, and the terms of the claim with it; None without any."""
    claimed = [math.inf if r.epsilon == "inf" else r.epsilon for r in rows if r.epsilon is not None]
    stated = [row.privacy for row in rows if row.privacy] or [PrivacyOf()]
    weakest = max(stated, key=lambda p: math.inf if p.epsilon is None else float(p.epsilon))
    terms = weakest.model_dump(include={"delta", "unit", "relation", "reason", "covers"})
    return {"epsilon": max(claimed, default=None), **terms}
