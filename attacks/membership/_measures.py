"""Measures how well a client's model, or its update, goes with single examples."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge, MembershipCandidates
from fedsim.models.base import Classifier, normalize
from fedsim.models.local import local_updates, mean_gradient_factor
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Tensors

_AT_ONCE = 256
_SHADOW_ENTRIES = 1 << 25  # maximum number of weights that are trained at once


def require_candidates(knowledge: Knowledge) -> MembershipCandidates:
    """Returns the candidates that are asked about, or raises AttackFailed."""
    if knowledge.candidates is None:
        raise AttackFailed("there are no candidates to ask about (observe.candidates)")
    return knowledge.candidates


def weights_after(seen: Observation, update: Tensors) -> Tensors:
    """Returns the weights sent in `seen`, by name, moved by `update` where it has them."""
    # A gradient is descended at the learning rate; an update is itself the change of weights.
    scale = -seen.training.lr if seen.training.algorithm == "fedsgd" else 1.0
    moved = {name: seen.parameters[name] + scale * change for name, change in update.items()}
    return {**seen.parameters, **moved}


def chunk_size(seen: Observation) -> int:
    """Returns how many shadows of `seen`, of as many clients as it has, may train together."""
    weights = sum(value.numel() for value in seen.parameters.values())
    return max(1, _SHADOW_ENTRIES // (weights * seen.num_clients))


def train_shadows(
    model: Classifier, seen: Observation, batches: list[tuple[Tensor, Tensor]]
) -> Tensors:
    """Returns the updates (S, ...) of S shadows by name, each the mean of n clients, as in `seen`.

    `batches` has inputs (S n, B, ...), normalized, and labels (S n, B) of each local step of all
    clients; a single batch serves all steps.
    """
    training = seen.training
    count = len(batches[0][1])
    start = {n: value.expand(count, *value.shape) for n, value in seen.parameters.items()}
    # One batch for all steps is drawn once and repeated.
    repeated = batches * (training.steps // len(batches))
    updates = local_updates(model, start, seen.buffers, repeated, training)
    # The first axis is (shadow, client), and a shadow is the mean of its clients.
    return {
        n: torch.unflatten(u.detach(), 0, (-1, seen.num_clients)).mean(1)
        for n, u in updates.items()
    }


AskedExamples = tuple[Tensor, Tensor]
"""Examples that are asked about: inputs (N, ...) in [0, 1], and labels (N,)."""


def log_odds(seen: Observation, weights: Tensors, asked: AskedExamples) -> Tensor:
    """Returns log(p / (1 - p)) (N,) float64, p being the label's probability under `weights`."""
    model, state = rebuild(seen).eval(), {**seen.buffers, **weights}
    found = []
    with torch.no_grad():
        for images, classes in zip(*(torch.split(each, _AT_ONCE) for each in asked), strict=True):
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


def losses(seen: Observation, weights: Tensors, asked: AskedExamples) -> Tensor:
    """Returns the cross-entropy (N,) of each example, in nats, under the model of `log_odds`."""
    # -log p = log(1 + exp(-odds)), which is exact also where p rounds to 1.
    return F.softplus(-log_odds(seen, weights, asked))


_LARGEST_EXACT = 1 << 18  # number of parameters up to which gradients are compared entry by entry
_SKETCHED = 1 << 17
"""Longer gradients are compared by so many sums of their entries with random signs."""
_GRADIENT_ENTRIES = 1 << 26
"""Maximum number of entries of the gradients that are computed together."""


class ExampleGradients:
    """Computes examples' gradients of an observation's model, and vectors to compare them with."""

    # Models above `_LARGEST_EXACT` are compared by a count sketch, whose inner products are, on
    # average, those of the entries (Charikar, Chen and Farach-Colton, 2002). Batch norm and dropout
    # are as at evaluation, since an example alone has no batch.

    def __init__(self, observation: Observation, kept: Tensors | None = None) -> None:
        """Rebuilds the model; `kept` masks the entries that are compared, None: all are."""
        self._spec = observation.model
        self._model = rebuild(observation).eval()
        self._state = {**observation.parameters, **observation.buffers}
        self._names = list(observation.update)
        self._mask = None if kept is None else self._flat(kept)
        self._entries = sum(value.numel() for value in observation.update.values())
        self._sums: Tensor | None = None
        if self._entries > _LARGEST_EXACT:
            # The sketch is arbitrary and the same for all that is compared.
            stream = torch.Generator().manual_seed(0)
            self._sums = torch.randint(_SKETCHED, (self._entries,), generator=stream)
            self._signs = 2.0 * torch.randint(2, (self._entries,), generator=stream) - 1
        self._each: Callable[[Tensors, Tensor, Tensor], Tensors] = vmap(
            grad(self._loss), in_dims=(None, 0, 0)
        )

    def _loss(self, trained: Tensors, image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(self._model, {**self._state, **trained}, (image[None],))
        return F.cross_entropy(logits, label[None])

    def of(self, asked: AskedExamples) -> Tensor:
        """Returns the gradients (N, k) of each example's loss: k entries, or k sums of a sketch."""
        # Only what the update names is differentiated; all else is a constant of the model.
        trained = {name: self._state[name] for name in self._names}
        # Each example has a gradient as large as the model, so that few are made at a time.
        size = max(1, min(256, _GRADIENT_ENTRIES // self._entries))
        found = []
        for images, classes in zip(*(torch.split(each, size) for each in asked), strict=True):
            each = self._each(trained, normalize(images, self._spec), classes)
            flat = torch.cat([each[name].flatten(1) for name in self._names], dim=1)
            found.append(self._compare(flat.detach()))
        return torch.cat(found)

    def vector(self, update: Tensors) -> Tensor:
        """Returns an update, with its sign, as a vector (k,) that gradients compare with."""
        return self._compare(self._flat(update)[None])[0]

    def _flat(self, tensors: Tensors) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in self._names]).float()

    def _compare(self, flat: Tensor) -> Tensor:
        if self._mask is not None:
            flat = flat * self._mask
        if self._sums is None:
            return flat
        # Each entry is added with its sign to one sum. Products of different entries that meet
        # there have either sign, so that their mean is 0.
        sketch = torch.zeros(len(flat), _SKETCHED)
        return sketch.index_add_(1, self._sums, flat * self._signs)


class UpdateSimilarity:
    """Compares examples' gradients with any number of updates of one global model."""

    def __init__(self, seen: Observation, asked: AskedExamples) -> None:
        """Computes the examples' gradients at the weights that `seen` started from."""
        self._gradients = ExampleGradients(seen)
        self._rows = self._gradients.of(asked)
        # An update of weights points against the gradients; a gradient itself does not.
        self._sign = 1.0 if mean_gradient_factor(seen.training) > 0 else -1.0

    def inner(self, update: Tensors) -> Tensor:
        """Returns inner products (N,), positive where descending the gradient led to the update."""
        # A change of weights is negated and a gradient is not, so that more speaks for membership.
        return (self._rows @ (self._sign * self._gradients.vector(update))).double()

    def cosine(self, update: Tensors) -> Tensor:
        """Returns the cosine (N,) of each gradient and the update; 0 for one without length."""
        norms = self._rows.norm(dim=1) * self._gradients.vector(update).norm()
        cosines: Tensor = self.inner(update) / norms.double().clamp(min=1e-30)
        return cosines
