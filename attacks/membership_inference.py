"""Membership inference from a closed-form release, by the likelihood ratio.

The informed adversary of differential privacy knows every row but one and asks whether a given row
is there, too. Both laws of the release are then known, and no test beats their likelihood ratio
(Neyman and Pearson, 1933): what it tells apart is what (ε, δ) bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from fedsim.adversary import Attack, AttackFailed, AttackState, Needs
from fedsim.types import Knowledge, Observation, Reconstruction, Released
from fedsim_attacks.release_law import KNOWN, law


@dataclass(kw_only=True)
class Compared(AttackState):
    """The answer."""

    ratio: Tensor
    """0-d."""


@final
class MembershipInference(Attack[Compared]):
    """Says of a given row, by the exact likelihood ratio, whether a release was computed from it.

    Sketches and coefficients of all methods, alone and summed; all other rows are known.
    """

    paper: ClassVar[str] = (
        "The likelihood-ratio test, as in Carlini et al., Membership Inference Attacks From First "
        "Principles, S&P 2022, with exact laws; the adversary: Balle, Cherubin and Hayes, "
        "Reconstructing Training Data with Informed Adversaries, S&P 2022"
    )
    needs: ClassVar[Needs] = Needs(rows="others")
    reads: ClassVar[tuple[Released, ...]] = KNOWN
    asked_of_candidates: ClassVar[bool] = True

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Compared:
        """Everything happens here."""
        if knowledge.candidate is None:
            raise AttackFailed("there is no candidate to ask about")
        worlds = torch.stack([torch.zeros_like(knowledge.candidate), knowledge.candidate])
        absent, present = law(observation, knowledge).log_likelihood(worlds)
        return Compared(ratio=present - absent, loss=-torch.maximum(absent, present))

    def step(self, state: Compared) -> Compared:
        """Nothing is left to do."""
        return state

    def terminate(self, state: Compared) -> bool:
        """At once."""
        return True

    def postprocess(self, state: Compared) -> Reconstruction:
        """The ratio's logarithm. The loss is the lesser of both negative log-likelihoods."""
        return Reconstruction(
            membership=state.ratio.reshape(1), loss=float(state.loss), iterations=0
        )

    def total(self) -> int:
        """None."""
        return 0
