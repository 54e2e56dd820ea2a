"""Measures how well a client's model, or its update, goes with single examples.

All grow with membership: a client's model knows an example that it was trained on, and its update
points where the example's gradient does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge, MembershipCandidates
from fedsim.models.base import normalize
from fedsim.models.local import mean_gradient_factor
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Tensors
from fedsim_attacks.membership._example_gradients import ExampleGradients

_AT_ONCE = 256


def require_candidates(knowledge: Knowledge) -> MembershipCandidates:
    """Returns the candidates that are asked about.

    Raises:
        AttackFailed: there are none.
    """
    if knowledge.candidates is None:
        raise AttackFailed("there are no candidates to ask about (observe.candidates)")
    return knowledge.candidates


def weights_after(seen: Observation, update: Tensors) -> Tensors:
    """Returns the weights that an `update` of the global model leads to.

    The global model is that of `seen`, whose local training says what an update is. Of a gradient
    (FedSGD) they are those after one step of descent. Weights that the update lacks stay as they
    are.
    """
    # A gradient is descended at the learning rate; an update is itself the change of weights.
    scale = -seen.training.lr if seen.training.algorithm == "fedsgd" else 1.0
    moved = {name: seen.parameters[name] + scale * change for name, change in update.items()}
    return {**seen.parameters, **moved}


def log_odds(seen: Observation, weights: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns log(p / (1 - p)) (N,) float64, with p the probability of each example's label.

    Args:
        seen: Names the model. Batch norm computes with the global buffers.
        weights: Weights to compute with, by name; others are those that `seen` started from.
        inputs: (N, ...) pixels or entries on [0, 1].
        labels: (N,) int64.
    """
    model, state = rebuild(seen).eval(), {**seen.buffers, **weights}
    found = []
    with torch.no_grad():
        batches = zip(torch.split(inputs, _AT_ONCE), torch.split(labels, _AT_ONCE), strict=True)
        for images, classes in batches:
            logits = functional_call(model, state, (normalize(images, seen.model),)).double()
            found.append(odds_of_logits(logits, classes))
    return torch.cat(found)


def odds_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns log(p / (1 - p)) (..., N) of the labels (N,) under logits (..., N, K)."""
    own = F.one_hot(labels, logits.shape[-1]).bool()
    # From logits, since 1 - p of a sure model is lost to rounding.
    others = logits.masked_fill(own, float("-inf")).logsumexp(-1)
    odds: Tensor = logits.masked_fill(~own, 0.0).sum(-1) - others
    return odds


def losses(seen: Observation, weights: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns each example's cross-entropy (N,) under `weights`; arguments as in `log_odds`."""
    # -log p = log(1 + exp(-odds)), which is exact also where p rounds to 1.
    return F.softplus(-log_odds(seen, weights, inputs, labels))


class UpdateSimilarity:
    """Compares examples' gradients with any number of updates of one global model.

    Each update has to have all tensors that the update of `seen` has. For updates
    of more than 262,144 entries, a random sketch estimates products and lengths.
    """

    def __init__(self, seen: Observation, inputs: Tensor, labels: Tensor) -> None:
        """Computes the gradients of the examples at the weights that `seen` started from.

        `inputs` and `labels` are as in `log_odds`.
        """
        self._gradients = ExampleGradients(seen)
        self._rows = self._gradients.of(inputs, labels)
        # An update of weights points against the gradients; a gradient itself does not.
        self._sign = 1.0 if mean_gradient_factor(seen.training) > 0 else -1.0

    def inner(self, update: Tensors) -> Tensor:
        """Returns the inner products (N,) of each example's gradient and the `update`.

        `update` is taken as observed: a change of weights is negated here, a gradient is not. A
        larger value speaks for membership. It is not divided by learning rate or steps.
        """
        return (self._rows @ (self._sign * self._gradients.vector(update))).double()

    def cosine(self, update: Tensors) -> Tensor:
        """Returns the cosine (N,) of each gradient and the update; 0 for one without length.

        `update` is taken as observed: FedSGD's gradient, or else a change of weights, which is
        turned around here. So a larger cosine always speaks for membership.
        """
        norms = self._rows.norm(dim=1) * self._gradients.vector(update).norm()
        cosines: Tensor = self.inner(update) / norms.double().clamp(min=1e-30)
        return cosines
