"""What an attacker simulates of a model that draws chance, and of an orthogonal direction.

What a model draws while it trains is unknown to the attacker, and is fitted like the images: at the
true images and draws the recomputed update is the observed one. (Scheliga et al., Combining
Variational Modeling with Partial Gradient Perturbation to Prevent Deep Gradient Leakage, 2022, skip
the layers behind the draws instead.)

A tensor that is uniform among those as long as the gradient and orthogonal to it tells two numbers
of the gradient and no more: its norm, and that the inner product is 0. Both are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DRAWS = {torch.randn, torch.randn_like}
"""Functions whose results are fitted; whatever else a model draws stays random."""


@final
class GivenDraws(TorchFunctionMode):
    """Lets a model take `given` tensors for the normal values that it draws, in their order.

    It acts inside a `with` block of its own, on one pass of the model: what is given is used up.
    """

    def __init__(self, given: Sequence[Tensor] = ()) -> None:
        """Prepares to hand out `given`; what is drawn beyond them is random."""
        super().__init__()
        self._left = list(given)
        self.taken: list[Tensor] = []
        """All tensors that were drawn, given or random, in order."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `function`, or answers in its place if it draws."""
        if function not in _DRAWS:
            return function(*args, **(kwargs or {}))
        # In order, so that a draw is the same variable in each recomputation.
        drawn: Tensor = self._left.pop(0) if self._left else function(*args, **(kwargs or {}))
        self.taken.append(drawn)
        return drawn


def orthogonal_distance(
    update: Sequence[Tensor], target: Sequence[Tensor], norms: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Computes how far `update` is from orthogonal to `target`, and from as long as it.

    Averages ln²(|u| / |t|) + d cos²(u, t) over tensors of d entries; d cos² is 1 on average for a
    random u. Tensors of one entry, and those that are zero, tell nothing and are left out.

    Args:
        update: recomputed tensors u.
        target: observed tensors t, with the entries that u has.
        norms: |t| (0-d) of all entries of the observed tensors, also of those that u lacks.

    Returns:
        The distance (0-d), and its gradient in each tensor of `update`.
    """
    losses, slopes = [], []
    for u, t, norm in zip(update, target, norms, strict=True):
        if u.numel() < 2 or not norm:
            # A slope of zero, so that slopes stay in the places of their tensors.
            slopes.append(torch.zeros_like(u))
            continue
        size = u.norm().clamp_min(torch.finfo(u.dtype).tiny)
        longer, cosine = (size / norm).log(), (u * t).sum() / (size * norm)
        losses.append(longer.square() + u.numel() * cosine.square())
        # ∂ ln|u| / ∂u = u / |u|²; ∂cos/∂u = t / (|u| |t|) - u cos / |u|².
        along = u / size.square()
        slope = 2 * longer * along
        slopes.append(slope + 2 * u.numel() * cosine * (t / (size * norm) - cosine * along))
    count = max(len(losses), 1)
    total = torch.stack(losses).sum() if losses else update[0].new_zeros(())
    return total / count, [slope / count for slope in slopes]
