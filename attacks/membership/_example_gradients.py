"""Gradients of single examples at the weights that a client started from."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Tensors

LARGEST_EXACT = 1 << 18
"""Number of parameters up to which gradients are compared entry by entry."""
SKETCHED = 1 << 17
"""Longer gradients are compared by so many sums of their entries with random signs."""
_AT_ONCE = 1 << 26
"""Maximum number of entries of the gradients that are computed together."""


class ExampleGradients:
    """Computes per-example gradients of an observation's model, and vectors to compare them with.

    Models of more than 262,144 parameters are compared by a count sketch of 131,072 sums. Its inner
    products are those of the entries on average (Charikar, Chen and Farach-Colton, 2002). Batch
    norm and dropout compute as at evaluation, since an example alone has no batch.
    """

    def __init__(self, observation: Observation, kept: Tensors | None = None) -> None:
        """Rebuilds the model of `observation`.

        `kept` has a mask of the entries that are compared, by a parameter's name; None: all are.
        """
        self._spec = observation.model
        self._model = rebuild(observation).eval()
        self._state = {**observation.parameters, **observation.buffers}
        self._names = list(observation.update)
        self._mask = None if kept is None else self._flat(kept)
        self._entries = sum(value.numel() for value in observation.update.values())
        self._sums: Tensor | None = None
        if self._entries > LARGEST_EXACT:
            # The sketch is arbitrary and the same for all that is compared.
            stream = torch.Generator().manual_seed(0)
            self._sums = torch.randint(SKETCHED, (self._entries,), generator=stream)
            self._signs = 2.0 * torch.randint(2, (self._entries,), generator=stream) - 1
        self._each: Callable[[Tensors, Tensor, Tensor], Tensors] = vmap(
            grad(self._loss), in_dims=(None, 0, 0)
        )

    def _loss(self, trained: Tensors, image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(self._model, {**self._state, **trained}, (image[None],))
        return F.cross_entropy(logits, label[None])

    def of(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns the gradients (n, k) of each example's loss: k entries, or k sums of a sketch.

        Args:
            inputs: (n, ...) pixels or entries on [0, 1].
            labels: (n,) int64.
        """
        # Only what the update names is differentiated; all else is a constant of the model.
        trained = {name: self._state[name] for name in self._names}
        # Each example has a gradient as large as the model, so that few are made at a time.
        size = max(1, min(256, _AT_ONCE // self._entries))
        found = []
        for images, classes in zip(
            torch.split(inputs, size), torch.split(labels, size), strict=True
        ):
            each = self._each(trained, normalize(images, self._spec), classes)
            flat = torch.cat([each[name].flatten(1) for name in self._names], dim=1)
            found.append(self._compare(flat.detach()))
        return torch.cat(found)

    def vector(self, update: Tensors) -> Tensor:
        """Returns an update as a vector (k,) that gradients can be compared with.

        The sign of `update` stays: a change of weights points against gradients.
        """
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
        sketch = torch.zeros(len(flat), SKETCHED)
        return sketch.index_add_(1, self._sums, flat * self._signs)
