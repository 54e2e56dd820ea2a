"""Membership inference from a closed-form release, by the likelihood ratio.

No test beats it (Neyman and Pearson, 1933): its power is what (ε, δ) bounds. A kernel regression
shows how many rows it is of: there the question is whether the missing row is the given one.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.types import Observation, Payload, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.closed_form._kernel_release import (
    KERNELS,
    best_assignment,
    class_prior,
    known_rows,
    log_likelihoods,
    log_normal,
    read_model,
    require_one_missing,
)
from fedsim_attacks.closed_form._release_likelihood import KNOWN, release_likelihood


@final
class MembershipInference(DirectAttack):
    """Says of a given row, by the likelihood ratio, whether a release was computed from it.

    Sketches and coefficients of all methods, alone and summed, are judged by their distributions.
    Clipping, and sums of or noise on sketched coefficients, are approximated. Kernel regressions
    are judged against a row like the others in the given one's place. All other rows are known.
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
    """Whether a kernel regression's coefficients α̃ are used, too: they tell the labels."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns ln P(release | row) - ln P(release | no such row), as `membership` (1,).

        An AttackFailed says that there is no candidate, the other rows are not known, a defense
        does not declare its effect, or a kernel regression is not of them and one more.
        """
        if knowledge.candidate is None:
            raise AttackFailed("there is no candidate to ask about")
        if observation.payload in KERNELS:
            absent, present = self._compare_worlds(observation, knowledge, knowledge.candidate)
        else:
            # A row of zeros adds nothing to a Gram matrix: it stands for no row.
            worlds = torch.stack([torch.zeros_like(knowledge.candidate), knowledge.candidate])
            absent, present = release_likelihood(observation, knowledge).log_likelihood(worlds)
        ratio, loss = present - absent, -torch.maximum(absent, present)
        return Reconstruction(membership=ratio.reshape(1), loss=float(loss), iterations=0)

    def _compare_worlds(
        self, observation: Observation, knowledge: Knowledge, candidate: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes log-likelihoods of another row in the candidate's place and of the candidate."""
        known = known_rows(knowledge)
        model = read_model(observation, known)
        require_one_missing(model, known)
        likelihoods = log_likelihoods(model, torch.cat([known, candidate[None]]), self.alpha)
        d = model.rows.shape[1]
        prior = class_prior(known, d, learned=True)
        mean, covariance = prior.marginal()
        # A row like the others behind Laplace noise, taken as normal of the same covariance.
        noisy = covariance + model.variance() * torch.eye(d, dtype=torch.float64)
        other = log_normal(model.rows, mean, noisy)
        if self.alpha:
            other = other + (model.labels @ prior.shares).log()
        # Both worlds match all known rows anew: the candidate may be confused with one of them.
        _, absent = best_assignment(torch.cat([likelihoods[:-1], other[None]]))
        _, present = best_assignment(likelihoods)
        return model.rows.new_tensor(absent), model.rows.new_tensor(present)
