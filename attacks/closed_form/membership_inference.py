"""Membership inference from a closed-form release, by the likelihood ratio.

The informed adversary of differential privacy knows every row but one and asks whether a given row
is there, too. Both laws of the release are then known, and no test beats their likelihood ratio
(Neyman and Pearson, 1933): what it tells apart is what (ε, δ) bounds.

A kernel regression shows how many rows it is of. There the question is whether the row that the
adversary lacks is the given one, or any other: the rows are matched with the released ones as is
likeliest, with the given row, or with one like the others, in the place of the missing one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackFailed, AttackState
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.types import Observation, Payload, Reconstruction
from fedsim.words import number_of
from fedsim_attacks.closed_form._kernel_posterior import likeness, log_normal
from fedsim_attacks.closed_form._kernel_release import (
    KERNELS,
    assigned,
    log_likelihoods,
    others,
    read,
)
from fedsim_attacks.closed_form._release_law import KNOWN, law


@dataclass(kw_only=True)
class Compared(AttackState):
    """The answer."""

    ratio: Tensor
    """0-d."""


@final
class MembershipInference(Attack[Compared]):
    """Says of a given row, by the likelihood ratio, whether a release was computed from it.

    Sketches and coefficients of all methods, alone and summed, by their exact laws; kernel
    regressions against a row like the others. All other rows are known.
    """

    paper: ClassVar[str] = (
        "The likelihood-ratio test, as in Carlini et al., Membership Inference Attacks From First "
        "Principles, S&P 2022, with exact laws; the adversary: Balle, Cherubin and Hayes, "
        "Reconstructing Training Data with Informed Adversaries, S&P 2022"
    )
    needs: ClassVar[Grant] = Grant.least(rows="others")
    reads: ClassVar[tuple[Payload, ...]] = (*KNOWN, *KERNELS)
    asked_of_candidates: ClassVar[bool] = True

    alpha: bool = True
    """Of a kernel regression, whether what its coefficients α̃ tell is used, too: the labels."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Compared:
        """Everything happens here."""
        if knowledge.candidate is None:
            raise AttackFailed("there is no candidate to ask about")
        if observation.payload in KERNELS:
            absent, present = self._exchanged(observation, knowledge, knowledge.candidate)
        else:
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

    def _exchanged(
        self, observation: Observation, knowledge: Knowledge, candidate: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihoods of another row in the candidate's place, and of the candidate."""
        known = others(knowledge)
        model = read(observation, known)
        if len(known) + 1 != len(model.rows):
            raise AttackFailed(
                f"of {number_of(len(model.rows), 'released row')} {len(known)} are known, so that "
                "there is no one row that the candidate could be"
            )
        found = log_likelihoods(model, torch.cat([known, candidate[None]]), self.alpha)
        d = model.rows.shape[1]
        like = likeness(known, d, learned=True)
        mean, covariance = like.marginal()
        noisy = covariance + model.variance() * torch.eye(d, dtype=torch.float64)
        somebody = log_normal(model.rows, mean, noisy)
        if self.alpha:
            somebody = somebody + (model.labels @ like.shares).log()
        _, absent = assigned(torch.cat([found[:-1], somebody[None]]))
        _, present = assigned(found)
        return model.rows.new_tensor(absent), model.rows.new_tensor(present)
