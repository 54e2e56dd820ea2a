"""The threat models that the literature numbers A to H, and which of them a run has measured.

They are those of Carletti, Foggia, Mazzocca, Parrella and Vento, "SoK: Gradient Inversion Attacks
in Federated Learning" (USENIX Security 2025). A to E are passive and F to H active.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.results.lines import ResultRow
from fedsim.results.threat_model import threat_model_of
from fedsim.words import number_of

Letter = Literal["A", "B", "C", "D", "E", "F", "G", "H"]
Coverage = Literal["measured", "within", "not measured"]
"""`within`: not measured itself, and the attacker of a measured one can do all that it can."""

SOURCE = (
    "Carletti, Foggia, Mazzocca, Parrella and Vento, SoK: Gradient Inversion Attacks in Federated "
    "Learning, USENIX Security 2025"
)


@dataclass(frozen=True, kw_only=True)
class ThreatModel:
    """Describes one numbered attacker by what it has."""

    letter: Letter
    name: str
    has: str
    exceeded_by: str
    """Letters of the attackers who have all that it has, and more."""


THREAT_MODELS = (
    ThreatModel(
        letter="A",
        name="Eavesdropper",
        has="the model’s architecture and the updates",
        exceeded_by="BCDEFGH",
    ),
    ThreatModel(
        letter="B",
        name="Informed eavesdropper",
        has="A, and general knowledge such as that pictures are smooth",
        exceeded_by="CDEFGH",
    ),
    ThreatModel(
        letter="C",
        name="Parameter-aware eavesdropper",
        has="B, and how clients train: steps, batch size, learning rate",
        exceeded_by="DEFGH",
    ),
    ThreatModel(
        letter="D",
        name="Data-enhanced eavesdropper",
        has="C, and other data of the same kind",
        exceeded_by="EGH",
    ),
    ThreatModel(
        letter="E",
        name="Statistical-informed eavesdropper",
        has="D, and statistics of the client’s own data, as batch norm shows them",
        exceeded_by="",
    ),
    ThreatModel(
        letter="F",
        name="Active manipulator",
        has="C, and it changes the model that clients train",
        exceeded_by="GH",
    ),
    ThreatModel(
        letter="G",
        name="Data-enhanced manipulator",
        has="F, and other data of the same kind",
        exceeded_by="H",
    ),
    ThreatModel(
        letter="H",
        name="Active client manipulator",
        has="G, and it chooses who takes part, or adds clients of its own",
        exceeded_by="",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Covered:
    """Says whether a run has measured a threat model, and how that is known."""

    model: ThreatModel
    coverage: Coverage
    reason: str


def letter_of(row: ResultRow) -> Letter | None:
    """Returns the threat model that the attacker of `row` acts in; None for a closed-form release.

    Every attacker here knows how clients train, and is granted the rest by the scenario. Other data
    of the same kind may also be an attack's own (its parameter `public`, of a generator).
    """
    if row.subject == "rows":
        return None
    surrogate = _has_surrogate(row)
    if threat_model_of(row).malicious:
        return "G" if surrogate else "F"
    # Global running statistics are part of the model that everybody receives.
    if row.knowledge.bn in ("inferred", "exact"):
        return "E"
    return "D" if surrogate else "C"


def _has_surrogate(row: ResultRow) -> bool:
    return row.knowledge.public != "none" or bool(row.attack.brought)


def coverage(rows: Sequence[ResultRow]) -> list[Covered]:
    """Returns what the scored `rows` cover of each threat model, in the order of their letters."""
    return [_covered(model, rows) for model in THREAT_MODELS]


def _covered(model: ThreatModel, rows: Sequence[ResultRow]) -> Covered:
    own = [row for row in rows if letter_of(row) == model.letter]
    if own:
        reason = number_of(len(own), "attack run")
        if model.letter == "E" and not any(map(_has_surrogate, own)):
            reason += ", none of them with other data of the same kind"
        return Covered(model=model, coverage="measured", reason=reason)
    letters = {letter for row in rows if (letter := letter_of(row))}
    stronger = sorted(letters & set(model.exceeded_by))
    if stronger:
        return Covered(
            model=model,
            coverage="within",
            reason=f"whoever has this can run no attack that {stronger[0]} cannot; how much less "
            "it recovers was not measured",
        )
    return Covered(model=model, coverage="not measured", reason=_WHY[model.letter])


_WHY: dict[Letter, str] = {
    "A": "no update of a model was attacked",
    "B": "no update of a model was attacked",
    "C": "no update of a model was attacked",
    "D": "no attacker was granted other data of the same kind (knowledge.public)",
    "E": "no attacker was granted statistics of a client’s data (knowledge.bn)",
    "F": "the server changed nothing in the model (model.imprint, model.head.planted)",
    "G": "no server that changes the model was granted other data (knowledge.public)",
    "H": "no server here chooses who takes part, or adds clients of its own",
}
