"""Who attacks: what the server did, what an attacker was granted, and how that is worded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from fedsim.contracts.grant import Grant
from fedsim.report.figures import read_texts
from fedsim.results.lines import ResultRow
from fedsim.types import Manipulation
from fedsim.words import number_of

_DONE: Mapping[Manipulation, str] = {
    "honest": "",
    "planted": "planted weights",
    "modified": "put a module into the model",
}
"""What a server did to the model, in the order in which comparisons are shown."""

WATCHERS: Mapping[str, str] = {
    "server": "the server",
    "client": "another participant",
    "eavesdropper": "an eavesdropper on the wire",
}


@dataclass(frozen=True, kw_only=True, order=True)
class ThreatModel:
    """What an attacker did and had. The default is the honest server, to whom nothing is granted.

    They sort by how much they take: the honest server first, and the malicious servers last. Rows
    of one threat model may be ranked, of two never.
    """

    altered: int = 0
    """What the server did to the model: 0 nothing, 1 it planted weights, 2 it put in a module."""
    beyond: tuple[str, ...] = ()
    """What it had that no honest server has by itself: `labels=known`, or brought as `own ...`."""
    within: tuple[str, ...] = ()
    """What it had within that of an honest server, where it is other than the default."""

    @property
    def server(self) -> Manipulation:
        """Manipulation of the model by the server: `honest`, `planted` or `modified`."""
        return list(_DONE)[self.altered]

    @property
    def malicious(self) -> bool:
        """Whether the server altered the model."""
        return self.altered > 0

    @property
    def is_default(self) -> bool:
        """Whether the attacker is the honest server with neither more nor less than the default."""
        return self == HONEST

    @property
    def title(self) -> str:
        """Name of the threat model: `honest server`, or `honest server, granted labels=known`."""
        done = _DONE[self.server]
        return f"{f'malicious server that {done}' if done else 'honest server'}{self.differs}"

    @property
    def differs(self) -> str:
        """Text of what differs from the default, as `, granted labels=known`; else empty."""
        parts = [
            f", with {', '.join(self.within)}" if self.within else "",
            f", granted {', '.join(self.beyond)}" if self.beyond else "",
        ]
        return "".join(parts)


HONEST = ThreatModel()
"""The default: it follows the protocol, and is granted nothing but what its own role shows it."""


Comparison = tuple[str, str, str, str, ThreatModel, str]
"""(scenario, variant, data source, model, threat model, who looks): what may be ranked together."""


def threat_model_of(row: ResultRow) -> ThreatModel:
    """Returns the threat model of a row, from all that the row says was granted."""
    default = Grant().model_dump()
    within: list[str] = []
    beyond = list(row.knowledge.beyond_honest())
    for name, value in row.knowledge.model_dump().items():
        entry = f"{_quote(name)}={_quote(value)}"
        if name not in default or (value != default[name] and entry not in beyond):
            (within if name in default else beyond).append(entry)
    return ThreatModel(
        altered=list(_DONE).index(row.server),
        beyond=tuple(sorted({*(beyond + [f"{_OWN}{thing}" for thing in row.attack.brought])})),
        within=tuple(sorted({*within})),
    )


_OWN = "own "


def is_own(entry: str) -> bool:
    """Whether an `entry` of `ThreatModel.beyond` was brought by the attack, and not granted."""
    return entry.startswith(_OWN)


_WORD = re.compile(r"[^\W\d][\w./+-]*")
_OTHERS = ("True", "False", "None")


def _quote(value: object) -> str:
    """Words what a grant is called or has: quoted if other things would read like it."""
    plain = not isinstance(value, str) or (_WORD.fullmatch(value) and value not in _OTHERS)
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def unknown_grants(threat: ThreatModel) -> list[str]:
    """Returns the entries of `threat.beyond` that no grant of this version has, own ones too."""
    known = Grant.model_fields
    return [entry for entry in threat.beyond if entry.partition("=")[0] not in known]


def describe_attacker(threat: ThreatModel, vantage: str, *, masked: bool) -> str:
    """Names who attacks, with all that the threat model adds, as a subject: `the server`, say.

    Any `vantage` but `client` and `eavesdropper` is a server's; `masked` says whether that sees
    parts of a secure sum, and is ignored of others. A longer name ends in a comma.
    """
    done = _DONE[threat.server]
    if vantage in ("client", "eavesdropper"):
        apart = f", where a malicious server {done}" if done else ""
        name, seen = WATCHERS[vantage], threat.differs + apart
    else:
        name = f"a malicious server that {done}" if done else WATCHERS["server"]
        summed = ", which sees sums alone" if vantage == "aggregate" else ""
        seen = threat.differs + (", which sees masked updates" if masked else summed)
    return f"{name}{seen}," if seen else name


def describe_comparison(comparison: Comparison, beside: Iterable[Comparison] = ()) -> str:
    """Returns a comparison's name, as `quickstart (training.mode=eval), faces, convnet`.

    Threat model and vantage follow unless they are the honest server's. It is named, too, if the
    comparison is shown `beside` one of another threat model.
    """
    scenario, variant, dataset, model, threat, watcher = comparison
    done = f", {threat.server} by a malicious server" if threat.malicious else ""
    if threat.is_default and any(other[-2] != threat for other in beside):
        done = f", {threat.title}"
    done += threat.differs
    done += "" if watcher == "server" else f", seen by {WATCHERS.get(watcher, watcher)}"
    return f"{scenario}{f' ({variant})' if variant else ''}, {dataset}, {model}{done}"


def threat_model(rows: Sequence[ResultRow]) -> list[tuple[str, str]]:
    """Returns (`Sees`, words), (`Knows`, ...), (`Is granted`, ...) and (`Never sees`, ...).

    They are of the attackers of one comparison's `rows`; without rows the list is empty.
    """
    if not rows:
        return []
    texts = read_texts()
    views = [_phrase(rows, texts["vantages"], _view(rows))]
    if rows[0].main.asked_singly:
        views.append(_phrase(rows, texts["releases"], _kind_of_release))
        kernel = all(str(_kind_of_release(row)).startswith("kernel_") for row in rows)
        known = texts["known"]["kernel" if kernel else "rows"]
    else:
        views.append(_phrase(rows, texts["training"], lambda row: row.training.get("algorithm")))
        views.append(_phrase(rows, texts["mode"], lambda row: row.training.get("mode")))
        known = texts["known"]["update"]
    return [
        ("Sees", _sentence(views)),
        ("Knows", known["knows"].format(conduct=_conduct(rows))),
        ("Is granted", _describe_grants(rows)),
        ("Never sees", known["never"]),
    ]


def _view(rows: Sequence[ResultRow]) -> Callable[[ResultRow], str]:
    """What the attacker of a row sees: single updates of a stack that shows sums are masked."""
    summed = {row.defense.name for row in rows if row.vantage == "aggregate"}

    def view(row: ResultRow) -> str:
        alone = row.vantage in ("server", "eavesdropper")
        return "masked" if alone and row.defense.name in summed else row.vantage

    return view


def _kind_of_release(row: ResultRow) -> Any:
    return (row.release or {}).get("kind")


def _describe_grants(rows: Sequence[ResultRow]) -> str:
    parts = []
    for name, meaning in Grant.meanings(rows[0].main.part).items():
        phrases = dict(zip(Grant.values()[name], meaning.words, strict=True))
        parts.append(_phrase(rows, phrases, attrgetter(f"knowledge.{name}")))
    for entry in sorted({entry for row in rows for entry in unknown_grants(threat_model_of(row))}):
        having = sum(entry in threat_model_of(row).beyond for row in rows)
        among = "" if having == len(rows) else f"in {having} of {number_of(len(rows), 'run')} "
        parts.append(f"{among}what no honest server has by itself: {entry}")
    return _sentence(parts)


_CONDUCT: Mapping[Manipulation, str] = {
    "planted": "it has chosen weights of the head (planted)",
    "modified": "it has put a module into the model, whose gradient shows images (imprint)",
}
"""What each malicious server has done, as a clause."""


def _conduct(rows: Sequence[ResultRow]) -> str:
    altered = sum(row.server != "honest" for row in rows)
    if not altered:
        return "It follows the protocol."
    servers = {row.server for row in rows}
    if any((row.model.parameters.get("head") or {}).get("planted") for row in rows if row.model):
        servers.add("planted")  # beside a module
    changes = [text for server, text in _CONDUCT.items() if server in servers]
    honest = len(rows) - altered
    if honest:
        counted = f"In {honest} of {number_of(len(rows), 'run')} it follows the protocol"
        return f"{counted}; in the others it is malicious: {', or '.join(changes)}."
    return f"It follows the protocol, but {', and '.join(changes)}: a malicious server."


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(part for part in parts if part)
    return f"{text[:1].upper()}{text[1:]}."


def _phrase(
    rows: Sequence[ResultRow], phrases: dict[str, str], get: Callable[[ResultRow], Any]
) -> str:
    """Returns the phrase of each value that occurs, and in how many rows if there are several."""
    values = [get(row) for row in rows]
    kinds = [value for value in dict.fromkeys(values) if value in phrases]
    if len(kinds) == 1:
        return phrases[kinds[0]]
    return "; ".join(
        f"in {values.count(v)} of {number_of(len(rows), 'run')} {phrases[v]}" for v in kinds
    )
