"""How much of an update of the body is noise."""

from __future__ import annotations

from collections.abc import Collection

from fedsim.types import Observation
from fedsim_attacks.images_from_features._heads import Head


def relative_noise_variance(observation: Observation, head: Head) -> float:
    """Estimates the noise's variance in an entry of the body's update, over |body's update|².

    Of added noise, which is the same in all entries; that of stochastic rounding at most, which has
    a spacing of its own in each tensor. `head` is the head's share of the same update.
    """
    body = [tensor for name, tensor in observation.update.items() if name.startswith("body.")]
    energy = float(sum(tensor.double().square().sum() for tensor in body))
    if not energy or not head.noise:
        return 0.0
    if head.noisy:
        return head.noise / head.divisor**2 / energy
    spacings = [(float(t[t != 0].abs().min()) if t.any() else 0.0, t.numel()) for t in body]
    rounding = sum(count * spacing**2 / 6 for spacing, count in spacings)
    return rounding / sum(count for _, count in spacings) / energy


def noise_share(observation: Observation, head: Head, names: Collection[str] = ()) -> float:
    """Estimates the share of |update|² that is noise, in the body's tensors `names` or in all.

    `head` as for `relative_noise_variance`; the share is an estimate and may exceed 1.
    """
    body = {name: t for name, t in observation.update.items() if name.startswith("body.")}
    part = [body[name] for name in names or body]
    energy, whole = (
        float(sum(t.double().square().sum() for t in of)) for of in (part, body.values())
    )
    if not energy:
        return 0.0
    return (
        relative_noise_variance(observation, head) * sum(t.numel() for t in part) * whole / energy
    )
