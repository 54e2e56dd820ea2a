"""SVTPrivacy, the filter of NVFlare that selects entries by noisy comparisons."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedsim.contracts.defense import UpdateDefense, uniform, without_low_bits
from fedsim.contracts.guarantee import ExactMechanism, Guarantee
from fedsim.types import UNKNOWN, Effect, FedsimError, Noise, Tensors

_MOST_PASSES = 10_000
"""Number of passes after which comparisons are given up; NVFlare's go on for ever."""


@final
@dataclass(frozen=True, kw_only=True)
class SparseVectorRelease(ExactMechanism):
    """Describes the release of `count` of an update's entries, selected by noisy comparisons."""

    selection: float
    """ε that the comparisons of one round spend, at most."""
    each: float
    """ε of the noise on one selected entry."""
    count: int
    """Number of entries that are released in a round."""

    def epsilon(self, delta: float, releases: int) -> float:
        """Returns the lesser proven ε, by sum or by Rényi's bound. See `ExactMechanism.epsilon`."""
        from dp_accounting import LaplaceDpEvent
        from dp_accounting.rdp import RdpAccountant

        # Orders near 1 are for large ε, where the default ones begin too high.
        accountant = RdpAccountant([1 + 2.0**k for k in range(-14, 10)])
        noised = self.count * releases
        accountant.compose(LaplaceDpEvent(1 / self.each), noised)
        # The comparisons' ε is pure, so that it adds to any (ε, δ) of what follows.
        least = min(self.each * noised, float(accountant.get_epsilon(delta)))
        return self.selection * releases + least


@final
class SvtPrivacy(UpdateDefense):
    """Releases a share of the entries, with Laplace noise; zeros stand for all others.

    Entries are cut to ± gamma. Whole passes over all entries compare magnitude plus noise with a
    noisy threshold, until enough are accepted, of which some are drawn. NVFlare counts the ε of as
    many acceptances as it releases. A pass may accept every entry, and for each of them the proof
    needs as much: that is the ε stated here. A tensor that is a single number passes as it is. All
    else that is sent is finite: a NaN counts as 0.
    """

    paper: ClassVar[str] = (
        "NVFlare 2.9.0, nvflare.app_common.filters.SVTPrivacy; proof: Lyu, Su and Li, "
        "Understanding the Sparse Vector Technique for Differential Privacy, VLDB 2017, Theorem 4"
    )

    deployed_parts: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "nvflare.app_common.filters.svt_privacy.SVTPrivacy": {
            **{name: name for name in ("fraction", "epsilon", "noise_var", "gamma", "tau")},
            **{name: name for name in ("replace", "epsilon_threshold", "epsilon_release")},
            "NUM_STEPS_CURRENT_ROUND": "steps",
        }
    }

    fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the entries that is released, rounded up to a whole number."""
    epsilon: Annotated[float, Field(gt=0, le=1e6)] = 0.1
    """ε of the comparisons as NVFlare counts it."""
    noise_var: Annotated[float, Field(gt=0, le=1e6)] = 0.1
    """ε of the noise on each released entry, unless `epsilon_release` is given."""
    gamma: Annotated[float, Field(gt=0, le=1e12)] = 1e-5
    """Largest magnitude of an entry, in the update's units, per step."""
    tau: Annotated[float, Field(ge=0, le=1e12)] = 1e-6
    """Threshold of magnitudes, before noise, in the update's units, per step."""
    replace: bool = True
    """Whether accepted entries are drawn with replacement, so that fewer are released."""
    epsilon_threshold: Annotated[float, Field(gt=0)] | None = None
    """Part of `epsilon` for the threshold, below it. By default it is to the rest as 1 to
    (2c)^(2/3), c entries being released."""
    epsilon_release: Annotated[float, Field(gt=0)] | None = None
    """ε of the noise on all released entries together; default: `noise_var` for each."""
    steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = 1
    """NVFlare's NUM_STEPS_CURRENT_ROUND; 1 where the client does not report it."""

    @model_validator(mode="after")
    def _split(self) -> SvtPrivacy:
        if self.epsilon_threshold is not None and self.epsilon_threshold >= self.epsilon:
            raise ValueError("epsilon_threshold: expected less than epsilon, of which it is a part")
        return self

    @property
    def claimed_epsilon(self) -> float:
        """The parameter `epsilon`, which NVFlare claims for one round."""
        return self.epsilon

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Returns the update with the released entries noisy and all others 0, and `state`.

        A FedsimError says that too few entries passed the comparisons.
        """
        if not update:
            return update, state
        # In the order of the names, as NVFlare draws.
        values = torch.cat([update[n].detach().cpu().double().flatten() for n in sorted(update)])
        values = (values / self.steps).nan_to_num_(0.0).clamp_(-self.gamma, self.gamma)
        count = self._count(len(values))
        accepted = self._accept(values.abs(), count, rng)
        chosen = self._draw(accepted, count, rng)
        shown = torch.zeros_like(values)
        scale = 2 * self.gamma / self._each(count)
        noisy = values[chosen] + _laplace(scale, len(chosen), rng)
        shown[chosen] = without_low_bits(noisy, scale) * self.steps
        parts = torch.split(shown, [update[n].numel() for n in sorted(update)])
        found = dict(zip(sorted(update), parts, strict=True))
        return {
            n: found[n].view(t.shape).to(t.device, t.dtype) if t.ndim else t
            for n, t in update.items()
        }, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns a guarantee by a SparseVectorRelease. See `UpdateDefense.guarantee`.

        It has none if `before` has a mechanism, no known shapes, or a tensor of a single number.
        """
        if before.mechanism or before.shapes is None or not all(before.shapes):
            return before.unproven(
                "svt_privacy releases a tensor that is a single number without noise"
                if before.shapes
                else "svt_privacy spends an ε for each entry that it releases, of an unknown number"
            )
        entries = before.entries or 0
        count = self._count(entries)
        threshold, query = self._selection(count)
        return Guarantee(
            mechanism=SparseVectorRelease(
                unit="client",
                relation="replace_one",
                accountant="sparse vector technique and Laplace noise",
                # For each acceptance the proof moves a comparison's noise by twice the query's
                # sensitivity; c of them make `query`, and a pass may accept all entries.
                selection=threshold + query * entries / count,
                each=self._each(count),
                count=count,
            )
        )

    def effect(self, before: Guarantee) -> Effect:
        """Returns a `truncated` Effect with noise and `removed`; UNKNOWN if it needs the shapes."""
        if before.entries is None and self.epsilon_release is not None:
            return UNKNOWN  # the noise hangs on the number of entries that share the total ε
        scale = 2 * self.gamma / self._each(self._count(before.entries or 1))
        variance = 2 * (scale * self.steps) ** 2
        return Effect(
            noise=(Noise(variance=variance, on="update"),),
            removed="others",
            truncated=self.gamma * self.steps,
        )

    def _count(self, entries: int) -> int:
        return max(1, min(entries, math.ceil(entries * self.fraction)))

    def _each(self, count: int) -> float:
        return self.noise_var if self.epsilon_release is None else self.epsilon_release / count

    def _selection(self, count: int) -> tuple[float, float]:
        """Returns the parts of `epsilon` for the threshold and for `count` acceptances."""
        threshold = self.epsilon_threshold or self.epsilon / (1 + (2.0 * count) ** (2 / 3))
        return threshold, self.epsilon - threshold

    def _accept(self, magnitudes: Tensor, count: int, rng: torch.Generator) -> Tensor:
        """Returns the indices that passes of comparisons accept: at least `count` of them."""
        threshold, query = self._selection(count)
        barrier = self.tau + _laplace(self.gamma / threshold, 1, rng)
        accepted = torch.zeros(len(magnitudes), dtype=torch.bool)
        for _ in range(_MOST_PASSES):
            noise = _laplace(2 * self.gamma * count / query, len(magnitudes), rng)
            accepted |= magnitudes + noise >= barrier
            if int(accepted.sum()) >= count:
                return accepted.nonzero().squeeze(1)
        raise FedsimError(
            f"svt_privacy: {_MOST_PASSES:,} passes accepted {int(accepted.sum())} of {count} "
            "entries; raise epsilon_threshold, or lower tau"
        )

    def _draw(self, accepted: Tensor, count: int, rng: torch.Generator) -> Tensor:
        """Returns the indices that are released, each once."""
        if self.replace:
            drawn = (uniform((count,), rng) * len(accepted)).long().clamp_max(len(accepted) - 1)
            return torch.unique(accepted[drawn])  # type: ignore[no-any-return]
        return accepted[uniform((len(accepted),), rng).argsort()[:count]]


def _laplace(scale: float, count: int, rng: torch.Generator) -> Tensor:
    """Draws Laplace noise of that scale, (count,) float64, as a difference of two exponentials."""
    # The inverse of the distribution at one uniform number has gaps beyond 24 scales, which some of
    # a million entries reach. Here the second number fills the gaps that the first one leaves.
    first, second = (uniform((count,), rng).log() for _ in range(2))
    return scale * (first - second)
