"""Noise that a Flower server adds to its model, accounted for those who see that model alone.

Flower's wrappers add N(0, (z C / n)²) to the mean of n clipped updates, where C is the
L2 norm to which each update is clipped. z is the multiplier that holds for a client of weight 1/n
in that mean. FedAvg weights clients by their examples: a client of weight w moves the mean by w C,
and its multiplier is z / (n w).

With adaptive clipping the count of clipped updates is released as well, with noise of deviation σ,
since the next clipping norm follows from it. One client moves it by 1. (Andrew et al.,
Differentially Private Learning with Adaptive Clipping, NeurIPS 2021, count from 1/2, so that it is
moved by 1/2: Flower's z takes that for granted.)

Flower moves the norm before it adds its noise, which so follows the next norm and not the one to
which updates were clipped. The next is exp(r (f - q)) times less, of rate r, quantile q and the
noisy share f of clipped updates. f exceeds 1 + σ t / n, of a normal quantile t, with a chance that
is half of δ over all rounds. What is left of δ is that of the noise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.privacy.numerics import gaussian
from fedsim.recording.deployed_parts import DeployedPart
from fedsim.recording.exchanges import Exchange
from fedsim.types import Tensors
from fedsim.words import printable

_HOME = "flwr.serverapp.strategy."
_FIXED, _ADAPTIVE = f"{_HOME}dp_fixed_clipping.", f"{_HOME}dp_adaptive_clipping."
_CLIPS = (
    "flwr.clientapp.mod.centraldp_mods.fixedclipping_mod",
    "flwr.clientapp.mod.centraldp_mods.adaptiveclipping_mod",
)
_LARGEST_EXPONENT = 300.0
"""Larger ones overflow when they are squared."""
_MEANS = (f"{_HOME}fedavg.FedAvg", f"{_HOME}fedprox.FedProx")
"""Strategies whose new model is the weighted mean of what they get."""


@dataclass(frozen=True, kw_only=True)
class ServerNoise:
    """What a wrapper of the server claims, and the ε for those who see its model alone."""

    text: str
    """Wrapper and its settings, what it claims, and `epsilon` or why there is none."""
    epsilon: float
    """ε of all recorded rounds against the client's absence; inf with a reason in `text`."""
    claimed_epsilon: float | None
    """Budget of its accountant, or what that has counted; None without an accountant."""


def read_server_noise(
    strategies: Sequence[DeployedPart],
    exchanges: Sequence[Exchange],
    *,
    mods: Sequence[DeployedPart] | None,
    delta: float,
) -> ServerNoise | None:
    """Returns what the outermost strategy adds; None if that is no wrapper of Flower's for privacy.

    Args:
        strategies: The server's strategies, outermost first.
        exchanges: All recorded exchanges.
        mods: Clients' mods, outermost first; None if they are not known.
        delta: δ of the ε, unless the wrapper's accountant has one.
    """
    if not strategies or not strategies[0].name.startswith((_FIXED, _ADAPTIVE)):
        return None
    wrapper = strategies[0]
    budget, spent = wrapper.number("accountant_max_epsilon"), wrapper.number("accountant_epsilon")
    delta = wrapper.number("accountant_delta") or delta
    found = _find_epsilon(strategies, exchanges, mods, delta)
    text = f"{wrapper}: it has seen each answer before it adds noise, so that it learns all; "
    if budget is not None:
        text += f"its accountant stops at ε = {budget:g}; "
    if spent is not None:
        releases = wrapper.number("accountant_releases") or 0
        text += f"it has counted ε = {spent:.4g} after {releases:g} rounds; "
    text += "those who see its model alone have true ε = "
    if isinstance(found, str):
        epsilon, text = math.inf, f"{text}∞, since {found}"
    else:
        rounds = len({each.round for each in exchanges})
        epsilon = found
        text += f"{found:.4g} at δ = {delta:g} after {rounds} rounds (client, zero out)"
        text += ", if no update has NaN, which Flower's clip passes"
    return ServerNoise(
        text=text, epsilon=epsilon, claimed_epsilon=spent if budget is None else budget
    )


def _find_epsilon(
    strategies: Sequence[DeployedPart],
    exchanges: Sequence[Exchange],
    mods: Sequence[DeployedPart] | None,
    delta: float,
) -> float | str:
    """Returns the ε of all rounds of the client that weighs most, or why there is none."""
    from scipy.special import ndtri

    wrapper, inner = strategies[0], strategies[1:]
    multiplier, sampled = wrapper.number("noise_multiplier"), wrapper.number("num_sampled_clients")
    if not multiplier or not sampled:
        return "it adds no noise"
    if not 0 < delta < 1:
        return "its δ is not between 0 and 1"
    if [each.name for each in inner] not in [[name] for name in _MEANS]:
        return "the strategy inside may move the model by more than the mean of the updates"
    # The other wrappers clip what arrives themselves.
    if "ClientSide" in wrapper.name:
        if mods is None:
            return "it is not known whether clients clip"
        # What acts behind a clip may enlarge the update again.
        if not mods or not mods[0].name.startswith(_CLIPS):
            return "clients do not clip, so that nothing is bounded"
    if unbounded := _find_unbounded(exchanges[-1].read_reply()):
        return unbounded
    shares = _find_shares(exchanges, str(inner[0].settings.get("weighted_by_key")), int(sampled))
    if isinstance(shares, str):
        return shares
    count, lag = 0.0, 1.0
    if wrapper.name.startswith(_ADAPTIVE):
        deviation = wrapper.number("clipped_count_stddev")
        if not deviation:
            return "the count of clipped updates gets no noise"
        count, delta = 1 / deviation**2, delta / 2
        rounds = len({each.round for each in exchanges})
        most = 1 + deviation * float(-ndtri(delta / rounds)) / sampled
        pace, aim = wrapper.number("clip_norm_lr"), wrapper.number("target_clipped_quantile")
        if pace is None or aim is None:
            return "it is not known how its norm moves, which its noise follows"
        lag = math.exp(min(pace * max(0.0, most - aim), _LARGEST_EXPONENT))
    # Gaussian releases compose to one, of the sum of their squared ratios.
    ratios = [
        math.fsum((lag * sampled * share / multiplier) ** 2 + count for share in own)
        for own in shares.values()
    ]
    return float(gaussian.epsilon(1 / math.sqrt(max(ratios)), delta))


def _find_unbounded(reply: Tensors) -> str:
    """Returns why Flower's clip or noise misses some tensors of a reply; empty if it does not."""
    for name, value in reply.items():
        # NumPy makes a copy of a single number, which is scaled in place of the update's own.
        if not value.ndim:
            return f"{printable(name)} is a single number, which the clip does not scale"
        if not value.is_floating_point():
            return f"{printable(name)} has no floating-point numbers, for which noise is rounded"
    return ""


def _find_shares(
    exchanges: Sequence[Exchange], weighted_by: str, sampled: int
) -> dict[int, list[float]] | str:
    """Returns node -> its weights in the means of its rounds, or why they are not known."""
    rounds: dict[int, dict[int, float]] = defaultdict(dict)
    for each in exchanges:
        weight = each.number(weighted_by)
        if weight is None or weight <= 0:
            return f"not all clients state {weighted_by!r}, by which they are weighted"
        rounds[each.round][each.node_id] = weight
    # A round that is missing spent privacy, too, and its weights are not known.
    if sorted(rounds) != list(range(1, max(rounds) + 1)):
        return "not all rounds were recorded"
    # A share needs the weights of all answers in its mean.
    if any(len(weights) != sampled for weights in rounds.values()):
        return f"not every round has {sampled} recorded answers"
    shares: dict[int, list[float]] = defaultdict(list)
    for weights in rounds.values():
        total = math.fsum(weights.values())
        for node, weight in weights.items():
            shares[node].append(weight / total)
    return shares
