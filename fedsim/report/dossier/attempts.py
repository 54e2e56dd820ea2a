"""Which attacks a run has tried, and which of the installed ones it has not, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from fedsim.contracts import plugins
from fedsim.contracts.attack import Attack, unreadable
from fedsim.contracts.grant import Grant
from fedsim.report.figures import describe_stack
from fedsim.results.lines import ResultRow
from fedsim.results.reading import Run
from fedsim.types import Payload
from fedsim.words import number_of

_GROUP = "fedsim.attacks"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Describes one attack over all its trials."""

    label: str
    summary: str
    """What it does; empty where the plugin is not installed here."""
    parameters: str
    ok: int
    n: int
    seconds: float | None
    """Mean of a trial."""


@dataclass(frozen=True, kw_only=True)
class Untried:
    """Names an installed attack that the run has not tried, and why."""

    name: str
    summary: str
    reason: str


def tried(rows: Sequence[ResultRow]) -> list[Tried]:
    """Returns the attacks of `rows`, each once, in their order."""
    known = {plugin.name: plugin for plugin in plugins.installed(_GROUP)}
    found = []
    for label in dict.fromkeys(row.attack.label for row in rows):
        trials = [row for row in rows if row.attack.label == label]
        attack = trials[0].attack
        seconds = [row.cost.seconds for row in trials if row.cost and row.cost.seconds is not None]
        plugin = known.get(attack.name)
        found.append(
            Tried(
                label=label,
                summary=plugin.summary if plugin else "",
                parameters=_parameters(attack.name, attack.parameters, attack.restarts),
                ok=sum(row.ok for row in trials),
                n=len(trials),
                seconds=sum(seconds) / len(seconds) if seconds else None,
            )
        )
    return found


def _parameters(name: str, parameters: dict[str, object], restarts: int) -> str:
    described = describe_stack([{"name": name, **changed(_GROUP, name, parameters)}])
    return f"{described}, {restarts} restarts" if restarts > 1 else described


def changed(group: str, name: str, parameters: dict[str, object]) -> dict[str, object]:
    """Returns the parameters of a plugin that are not at their defaults.

    All are returned if the plugin is not installed here, and so its defaults are not known.
    """
    plugin = next((each for each in plugins.installed(group) if each.name == name), None)
    if plugin is None or plugin.cls is None:
        return parameters
    defaults = {p.name: p.default for p in plugin.parameters if not p.required}
    return {
        key: value
        for key, value in parameters.items()
        if key not in defaults or defaults[key] != value
    }


def untried(rows: Sequence[ResultRow], runs: Sequence[Run] = ()) -> list[Untried]:
    """Returns the installed attacks that none of `rows`, of `runs`, is of, with the reason, by
    name."""
    names = {row.attack.name for row in rows}
    due = {
        entry.get("name")
        for run in runs
        if not run.ended
        for entry in run.setting("attacks") or []
        if isinstance(entry, dict)
    }
    released = {_payload(row) for row in rows}
    grants = list({row.knowledge: None for row in rows})
    return [
        Untried(
            name=plugin.name,
            summary=plugin.summary,
            reason="the run has not come to it"
            if plugin.name in due
            else _reason(plugin, released, grants),
        )
        for plugin in plugins.installed(_GROUP)
        if plugin.name not in names
    ]


def _payload(row: ResultRow) -> Payload:
    return "update" if row.release is None else cast("Payload", row.release.get("kind"))


def _reason(plugin: plugins.Installed, released: set[Payload], grants: Sequence[Grant]) -> str:
    if plugin.error is not None:
        return f"it cannot be loaded here: {plugin.error}"
    cls = plugin.cls
    assert cls is not None and issubclass(cls, Attack)
    for payload in sorted(released, key=str):
        why = unreadable(plugin.name, cls.reads, payload)
        if why and not released & set(cls.reads):
            return why
    lacks = [grant.lacks(cls.needs) for grant in grants]
    if lacks and all(lacks):
        return f"it {lacks[0]}"
    required = [parameter.name for parameter in plugin.parameters if parameter.required]
    if required:
        return (
            f"the scenario does not name it; it needs {' and '.join(required)}, which only its "
            "user can give"
        )
    return "the scenario does not name it; whether it fits this system was not checked"


def unobserved(rows: Sequence[ResultRow], runs: Sequence[Run]) -> list[str]:
    """Words which vantages, clients and rounds nobody looked at."""
    lines = []
    vantages = {row.vantage for row in rows}
    for vantage, who in (
        ("client", "What another participant sees"),
        ("eavesdropper", "What somebody on the wire sees"),
    ):
        if vantage not in vantages:
            lines.append(f"{who} was not attacked.")
    for run in runs[:1]:
        clients, rounds = run.setting("data", "clients"), run.setting("training", "rounds")
        attacked = {row.client for row in rows if row.client >= 0}
        if isinstance(clients, int) and attacked:
            lines.append(
                f"{len(attacked)} of {number_of(clients, 'client')} were attacked on their own."
            )
        looked = sorted({row.round for row in rows})
        if isinstance(rounds, int):
            lines.append(
                f"Updates of {len(looked)} of {number_of(rounds, 'round')} were attacked "
                f"({', '.join(map(str, looked))})."
            )
    return lines
