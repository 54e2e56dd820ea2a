"""Uniform quantization, after QSGD (Alistarh et al. 2017)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.defense import UpdateDefense, uniform
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, Tensors


@final
class Quantization(UpdateDefense):
    """Rounds every tensor to 2^bits - 1 levels, evenly spaced from -max|x| to max|x|.

    With the spacing d = max|x| / (2^(bits-1) - 1), deterministic rounding errs by at most d / 2 and
    stochastic rounding by less than d, and is unbiased. The values travel as floats of the update's
    type: what is lost of them is measured, not what a packed encoding would save on the wire. A
    tensor that is empty, zero or not finite passes unchanged.
    """

    paper: ClassVar[str] = (
        "Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and "
        "Encoding, NIPS 2017, with the max-norm scaling of its experiments"
    )

    bits: Annotated[int, Field(ge=2, le=16)]
    """Bits per entry, one of them for the sign."""
    rounding: Literal["deterministic", "stochastic"] = "stochastic"
    """`deterministic`: to the nearest level; `stochastic`: up or down, right on average."""

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Returns the update, each tensor rounded, and `state`. See `UpdateDefense.apply`."""
        return {name: self._quantize(tensor, rng) for name, tensor in update.items()}, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns `before` without a bound on the update: rounding up may lengthen it."""
        return before.unproven("quantization may round the update up beyond its bound")

    def effect(self, before: Guarantee) -> Effect:
        """Returns an Effect that is `rounded`. See `UpdateDefense.effect`."""
        return Effect(rounded=True)

    def _quantize(self, tensor: Tensor, rng: torch.Generator) -> Tensor:
        # float64: max|x| / levels must not vanish for the smallest float32, nor the draw be coarse
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        levels = 2 ** (self.bits - 1) - 1
        spacing = largest / levels
        if not 0 < spacing < torch.inf:
            return tensor
        level = tensor.double() / spacing
        if self.rounding == "deterministic":
            level.round_()
        else:
            # floor(x + u) with u uniform in [0, 1) is up with the
            # probability of x's fraction: x on average.
            draw = uniform(tensor.shape, rng)
            level.add_(draw.to(tensor.device)).floor_()
        rounded: Tensor = level.clamp_(-levels, levels).mul_(spacing).to(tensor.dtype)
        return rounded
