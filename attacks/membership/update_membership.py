"""Membership from updates, by asking whether an example's gradient is part of the sum.

An update is about a weighted sum of the gradients g_i of what the client trained on, at the weights
that were sent, plus what the weights moved meanwhile. So the coefficients of candidates in a ridge
regression of the update tell who took part, from the first round on and before anything is
overfitted. Scores that ask instead whether the model knows an example (loss, cosine) see the sum of
all other gradients as noise.

With the mean gradient v of an update, G the gradients of candidates and public examples as rows,
A = G G' and b = G v, the coefficients are a = (A + λ I)^-1 b.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.models.local import mean_gradient_factor
from fedsim.types import Observation, Reconstruction, as_pixels
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.membership._example_gradients import ExampleGradients


@final
class UpdateMembership(DirectAttack):
    """Says of candidates whether they are part of a client's updates, or of a sum of clients."""

    takes_rows: ClassVar[bool] = True
    asked_of_candidates: ClassVar[bool] = True
    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = "fedsim: ridge regression of the update on candidates' gradients"

    ridge: Annotated[float, Field(gt=0, le=1e3)] = 0.01
    """λ, in units of the mean squared length of a gradient."""
    public: Annotated[int, Field(ge=0, le=10_000)] = 1000
    """Number of public examples that are fitted besides the candidates, if any are granted."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the sum over rounds of each candidate's coefficient over their deviation.

        The loss is the mean share of the update's squared length that the fit leaves.

        Raises:
            AttackFailed: there are no candidates, or no update has any part in them.
        """
        candidates = knowledge.candidates
        if candidates is None:
            raise AttackFailed("there are no candidates to ask about (observe.candidates)")
        inputs, labels = candidates.inputs, candidates.labels
        if knowledge.public_images is not None and knowledge.public_labels is not None:
            shown = as_pixels(knowledge.public_images[: self.public])
            inputs = torch.cat([inputs, shown])
            labels = torch.cat([labels, knowledge.public_labels[: self.public]])
        total = torch.zeros(len(candidates.labels), dtype=torch.float64)
        left = []
        for seen in candidates.of_victim(observation):
            coefficients, misfit = self._fit(seen, inputs, labels)
            own = coefficients[: len(total)]
            total += own / own.std().clamp(min=1e-30)
            left.append(misfit)
        return Reconstruction(membership=total, loss=sum(left) / len(left), iterations=0)

    def _fit(self, seen: Observation, inputs: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        """Returns coefficients (n,) of the examples in one update, and the share that is left."""
        gradients = ExampleGradients(seen)
        rows = gradients.of(inputs, labels)
        vector = gradients.vector(seen.update) * mean_gradient_factor(seen.training)
        gram, inner = (rows @ rows.T).double(), (rows @ vector).double()
        ridge = self.ridge * gram.diagonal().mean()
        gram.diagonal().add_(ridge)
        found = torch.linalg.solve(gram, inner)
        energy = float(vector.double().square().sum())
        return found, 1 - float(found @ inner) / energy if energy else 1.0
