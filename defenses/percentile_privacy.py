"""PercentilePrivacy, the filter of NVFlare that keeps and truncates an update's largest entries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, final

import numpy as np
import torch
from pydantic import Field

from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, Tensors


@final
class PercentilePrivacy(UpdateDefense):
    """Zeroes the entries below a percentile of all magnitudes, and cuts the others to ± gamma.

    Both act on the update over `steps`, as NVFlare divides it by the local steps that a client
    reports. It adds no noise: whatever it is called, it is no differential privacy. A tensor that
    is a single number passes unchanged. Beside a NaN nothing is zeroed, and it is sent as 0, where
    NVFlare's would stay: what is sent has to be bounded. Infinite entries are cut like others.
    """

    paper: ClassVar[str] = (
        "NVFlare 2.9.0, nvflare.app_common.filters.PercentilePrivacy, after Shokri and "
        "Shmatikov, Privacy-Preserving Deep Learning, CCS 2015"
    )

    deployed_parts: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy": {
            "percentile": "percentile",
            "gamma": "gamma",
            "NUM_STEPS_CURRENT_ROUND": "steps",
        }
    }

    percentile: Annotated[float, Field(ge=0, le=100)] = 10.0
    """Percentage of the entries, from 0 to 100, that are below the cutoff."""
    gamma: Annotated[float, Field(gt=0, le=1e12)] = 0.01
    """Largest magnitude that an entry keeps, in the update's units, per step."""
    steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = 1
    """NVFlare's NUM_STEPS_CURRENT_ROUND; 1 where the client does not report it."""

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Returns the update, zeroed and cut, and `state`. See `UpdateDefense.apply`."""
        if not update:
            return update, state
        flat = [tensor.detach().cpu().flatten().float() / self.steps for tensor in update.values()]
        # NumPy's own percentile, as it interpolates between two entries: NVFlare calls the same.
        cutoff = float(np.percentile(torch.cat(flat).abs().numpy(), self.percentile))
        return {n: self._filter(t, cutoff) if t.ndim else t for n, t in update.items()}, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns `before`, with the L2 bound of the cut entries if all tensors have known shapes.

        A tensor of a single number passes as it is, and leaves no bound.
        """
        if before.shapes is None or not all(before.shapes):
            return before
        # A margin of rounding, since sums of squares are rounded in another order elsewhere.
        longest = self.gamma * self.steps * math.sqrt(before.entries or 0)
        return before.bounded(longest * (1 + 1e-6))

    def effect(self, before: Guarantee) -> Effect:
        """Returns an Effect that is `truncated`, with `removed` unless `percentile` is 0."""
        removed = Effect(removed="smallest" if self.percentile else None)
        return replace(removed, truncated=self.gamma * self.steps)

    def _filter(self, tensor: torch.Tensor, cutoff: float) -> torch.Tensor:
        kept = tensor.masked_fill((tensor / self.steps).abs() < cutoff, 0).nan_to_num(
            0.0, posinf=math.inf, neginf=-math.inf
        )
        most = _round_down(self.gamma * self.steps, tensor.dtype)
        # Entries are not multiplied back by the steps: rounding would lengthen them.
        return kept.clamp(-most, most)


def _round_down(value: float, dtype: torch.dtype) -> float:
    """Returns a number of `dtype` of at most `value` > 0; 0 if none is above 0."""
    kind = torch.finfo(dtype)
    nearest = float(torch.tensor(min(value, kind.max), dtype=dtype))
    if nearest <= value:
        return nearest
    lower = float(torch.tensor(nearest * (1 - kind.eps), dtype=dtype))
    return lower if lower <= value else 0.0
