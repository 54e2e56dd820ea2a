"""The threat model of a row, computed here alone: what the server did, and what was granted.

Rows of one threat model may be ranked, of two never. The honest server, to whom nothing is granted,
is the default, and comes first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from fedsim.contracts.grant import Grant
from fedsim.results.lines import ResultRow
from fedsim.types import Server

_DONE: dict[Server, str] = {
    "honest": "honest server",
    "planted": "malicious server that planted weights",
    "modified": "malicious server that put a module into the model",
}
"""In the order in which comparisons are shown."""


@dataclass(frozen=True, kw_only=True, order=True)
class ThreatModel:
    """What an attacker did and had. The default is the honest server, to whom nothing is granted.

    They sort by how much they take: the honest server first, then one that has less or the public
    statistics, then one to whom more is granted, and the malicious servers last.
    """

    altered: int = 0
    """What the server has done to the model, as a position in the order of shown servers."""
    beyond: tuple[str, ...] = ()
    """What it had that no honest server has by itself, as `labels=known`, and what the attack
    brought along."""
    within: tuple[str, ...] = ()
    """What it had within that of an honest server, where it is other than the default."""

    @property
    def server(self) -> Server:
        """What the server has done to the model."""
        return list(_DONE)[self.altered]

    @property
    def malicious(self) -> bool:
        """Whether the server altered the model."""
        return self.altered > 0

    @property
    def is_default(self) -> bool:
        """Whether it is the honest server with neither more nor less than the default."""
        return self == HONEST

    @property
    def is_honest(self) -> bool:
        """Whether an honest server can be this attacker: nothing altered, nothing beyond."""
        return not self.malicious and not self.beyond

    @property
    def title(self) -> str:
        """Its name, as `honest server` or `honest server, granted labels=known`."""
        return f"{_DONE[self.server]}{self.differs}"

    @property
    def differs(self) -> str:
        """What it had, other than the default: `, granted labels=known`; empty if nothing."""
        parts = [
            f", with {', '.join(self.within)}" if self.within else "",
            f", granted {', '.join(self.beyond)}" if self.beyond else "",
        ]
        return "".join(parts)


HONEST = ThreatModel()
"""The default: it follows the protocol, nothing is planted, no module is put in, nothing is granted
but what its own role shows it. Labels are inferred."""


def threat_model_of(row: ResultRow) -> ThreatModel:
    """Returns the threat model of a row, from all that the row says was granted.

    What this version does not know, of a later version or of a third party, counts as granted
    beyond the honest server's.
    """
    default = Grant().model_dump()
    within: list[str] = []
    beyond = list(row.knowledge.beyond_honest())
    for name, value in row.knowledge.model_dump().items():
        entry = f"{_worded(name)}={_worded(value)}"
        if name not in default or (value != default[name] and entry not in beyond):
            (within if name in default else beyond).append(entry)
    return ThreatModel(
        altered=list(_DONE).index(row.server),
        beyond=_sorted(beyond + [f"{_OWN}{thing}" for thing in row.attack.brought]),
        within=_sorted(within),
    )


_OWN = "own "


def own(entry: str) -> bool:
    """Whether an entry of what an attacker had is what the attack brought, and was not granted."""
    return entry.startswith(_OWN)


def _worded(value: object) -> str:
    """Words what a grant is called or has: quoted if other things would read like it."""
    plain = not isinstance(value, str) or (_WORD.fullmatch(value) and value not in _OTHERS)
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


_WORD = re.compile(r"[^\W\d][\w./+-]*")
_OTHERS = ("True", "False", "None")


def _sorted(entries: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(entries)))
