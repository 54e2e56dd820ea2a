"""The privacy settings that a tap and a witness found: what they claim, and what holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from pydantic import ValidationError

from fedsim.assessment.clients import Picked
from fedsim.contracts import plugins
from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.guarantee import Mechanism
from fedsim.contracts.stack import Stack
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.numerics import gaussian
from fedsim.recording.exchanges import CHANGED, NO_ROOM, TWICE, DeployedPart, Exchange
from fedsim.results.record import Row
from fedsim.scenario import build_stack
from fedsim.scenario.model import PluginRef
from fedsim.types import LocalTraining, PrivacyClaim, Tensors
from fedsim.words import number_of, printable

_DELTA = 1e-5
"""δ of a claim whose settings state none."""
_PASS_ON = (
    "flwr.clientapp.mod.comms_mods.message_size_mod",
    "flwr.clientapp.mod.comms_mods.arrays_size_mod",
)
"""Mods of Flower's that change nothing."""
_NVFLARE = "nvflare."
_EXACT = "of the tensors alone, with exact numbers and noise that nobody can foretell"


@dataclass(frozen=True)
class _FoundDefenses:
    """Defenses that an app's mods or filters are, in the order in which they act on an update."""

    parts: tuple[DeployedPart, ...] = ()
    """Parts, outermost first, without those that change nothing."""
    refs: tuple[PluginRef, ...] = ()  # defenses of the last answer
    variants: tuple[tuple[PluginRef, ...], ...] = ()
    """Defenses of all answers, which differ where the server sets a norm anew."""
    unproven: str = ""  # reason why nothing is proven of them; empty if the ledger is to be asked

    @property
    def announcements(self) -> list[dict[str, object]]:
        return [{"name": ref.name, **ref.parameters} for ref in self.refs]


@dataclass(frozen=True)
class PrivacySettings:
    """Privacy settings of one app, which `read_privacy` finds and `describe_privacy` words."""

    defenses: _FoundDefenses | None
    """Defenses of the clients; None where it is not known which mods they apply."""
    server: _ServerNoise | None
    """Noise that a wrapper of the server's strategy adds; None where no wrapper was found."""
    rounds: int
    """Number of the last recorded round, which bounds the times that a client took part."""

    def describe_privacy(self, each: Picked, training: LocalTraining) -> tuple[Row, list[str]]:
        """Returns what defenses guarantee one client against the server, and report lines on it.

        The first part has the fields of `PrivacyClaim`, with "inf" for an ε of ∞. It is empty where
        neither client nor server adds privacy. `training` is what `AppTraining.training` returned.
        A damaged recording is a FedsimError.
        """
        found, lines = self.defenses, []
        privacy: Row = {}
        if found and found.parts:
            stated, more = self._claim(found, each.exchange, training)
            privacy = {**asdict(stated), "epsilon": "inf"}
            if math.isfinite(stated.epsilon):
                privacy["epsilon"] = stated.epsilon
            mods = " and ".join(map(str, reversed(found.parts)))
            counted = (
                "" if math.isinf(stated.epsilon) else f" after {number_of(self.rounds, 'round')}"
            )
            lines.append(
                f"privacy: clients apply {printable(mods)}: {_word(stated)}{counted}{more}"
            )
        if self.server:
            lines.append(f"privacy: the server applies {printable(self.server.text)}")
            if not privacy:
                # What the server adds, it adds to what it has seen.
                privacy = {
                    **asdict(_claim_nothing("the server adds its noise to answers it has seen")),
                    "epsilon": "inf",
                    "claimed_epsilon": self.server.claimed_epsilon,
                }
        if found is None:
            lines.append(
                "privacy: nothing tells which mods clients apply; fedsim.witness or "
                "fedsim.client_tap notes them"
            )
        return privacy, lines

    def _claim(
        self, found: _FoundDefenses, exchange: Exchange, training: LocalTraining
    ) -> tuple[PrivacyClaim, str]:
        """Returns the ledger's claim of `found`, and what it comes to against any other update."""
        sent = exchange.read_reply()
        stacks = [build_stack(refs) for refs in found.variants or (found.refs,)]
        for stack in stacks:
            stack.note_shapes(sent.values())
        if found.unproven:
            claimed = stacks[-1].claimed_epsilon
            return replace(_claim_nothing(found.unproven), claimed_epsilon=claimed), ""
        deltas = (part.number("delta") for part in found.parts)
        entry = Entry(
            rounds=self.rounds,
            num_examples=max(1, training.batch_size * training.steps),
            delta=next((d for d in deltas if d is not None and 0 < d < 1), _DELTA),
            unprotected=[name for name, value in sent.items() if not value.is_floating_point()],
        )
        # Each round is at least as private as those of the weakest settings.
        claims = [claim(stack, training, entry) for stack in stacks]
        stated, weakest = max(zip(claims, stacks, strict=True), key=lambda pair: pair[0].epsilon)
        if math.isinf(stated.epsilon):
            return stated, ""
        return replace(stated, covers=_EXACT), _against_any_other(weakest, training, entry)


def read_privacy(
    exchanges: Sequence[Exchange],
    mods: Mapping[str, Sequence[DeployedPart] | None],
    strategies: Sequence[DeployedPart] | None,
    left_out: Sequence[str] = (),
) -> PrivacySettings:
    """Returns the privacy settings of a recorded app.

    Args:
        exchanges: All exchanges of the run, at least one. A damaged recording is a FedsimError.
        mods: Mods of the client that answered, by message id, outermost first; None if unknown.
        strategies: The server's strategy and those that it wraps, outermost first; None if unknown.
        left_out: Lines of `exchanges.left_out`; answers left out may make ε infinite.
    """
    found = _read_defenses(exchanges, mods)
    doubts = [line for line in left_out if line.startswith((TWICE, CHANGED, NO_ROOM))]
    if found and doubts:
        found = replace(found, unproven=f"the tap left answers out: {doubts[0]}")
    rounds = max(each.round for each in exchanges)
    parts = None if found is None else found.parts
    server = _read_server_noise(strategies or (), exchanges, mods=parts, delta=_DELTA)
    return PrivacySettings(found, server, rounds)


def _read_defenses(
    exchanges: Sequence[Exchange], mods: Mapping[str, Sequence[DeployedPart] | None]
) -> _FoundDefenses | None:
    known = [each for each in exchanges if mods.get(each.message_id) is not None]
    if not known:
        return None
    each_found = [_of_one(mods[each.message_id] or (), each) for each in known]
    # An adaptive norm is told by the server, and is no setting of the mod itself.
    variants = {str(found.refs): found.refs for found in each_found}
    first = replace(each_found[-1], variants=tuple(variants.values()))
    if any(found.parts != first.parts for found in each_found):
        return replace(first, unproven="mods differ between clients or rounds")
    seen = {each.node_id for each in known}
    # Whether the mods acted on the answer that nobody witnessed is unknown.
    if len(known) < sum(each.node_id in seen for each in exchanges):
        return replace(first, unproven="a witnessed client gave answers that were not witnessed")
    return first


def _of_one(parts: Sequence[DeployedPart], exchange: Exchange) -> _FoundDefenses:
    told = {key: v for record in exchange.config.values() for key, v in record.items()}
    stated = {key: v for record in exchange.metrics.values() for key, v in record.items()}
    acting = tuple(part for part in parts if part.name not in _PASS_ON)
    refs: list[PluginRef] = []
    unknown = ""
    # The mod nearest to the app's own function changes the answer first.
    for part in reversed(acting):
        # Flower's mods read settings in the order. NVFlare's filters read them in the answer, of
        # which a metric may be called like a mod's setting.
        if ref := _ref_of(part, stated if part.name.startswith(_NVFLARE) else told):
            # What the first defense proves holds of anything that it is handed.
            unknown = unknown if refs else ""
            refs.append(ref)
        else:
            unknown = f"it is not known what {printable(part.name)} does"
    return _FoundDefenses(acting, tuple(refs), unproven=unknown)


def _ref_of(part: DeployedPart, told: Mapping[str, object]) -> PluginRef | None:
    """Returns the defense that declares to be `part`, told what messages state, if there is one."""
    for installed in plugins.list_installed("fedsim.defenses"):
        cls = installed.cls
        if cls is None or not issubclass(cls, UpdateDefense):
            continue
        names = cls.deployed_parts.get(part.name)
        if names is None:
            continue
        # A number that the defense does not know of may change what the part does.
        if any(isinstance(v, int | float) and k not in names for k, v in part.settings.items()):
            return None
        given = {**told, **part.settings}
        parameters = {own: given[key] for key, own in names.items() if key in given}
        try:
            resolved = cls.model_validate(parameters).model_dump(mode="json")
        except ValidationError:
            return None
        return PluginRef(name=installed.name, parameters=resolved)
    return None


def _against_any_other(stack: Stack, training: LocalTraining, entry: Entry) -> str:
    """Words the ε against any other contribution, where the claim is against none at all."""
    mechanism = stack.guarantees(training)[-1].mechanism
    if not isinstance(mechanism, Mechanism) or mechanism.relation != "zero_out":
        return ""
    # Two clipped updates differ by up to twice the norm; T rounds divide the multiplier by sqrt(T).
    multiplier = mechanism.noise_multiplier / 2 / math.sqrt(max(1, entry.rounds))
    return f"; against any other update ε = {gaussian.epsilon(multiplier, entry.delta):.3g}"


def _word(stated: PrivacyClaim) -> str:
    claims = stated.claimed_epsilon
    text = "" if claims is None else f"claimed ε = {claims:g} of a round, "
    if math.isinf(stated.epsilon):
        return f"{text}true ε = ∞, since {stated.reason}"
    assert stated.relation is not None
    relation = stated.relation.replace("_", " ")
    return (
        f"{text}true ε = {stated.epsilon:.4g} at δ = {stated.delta:g} ({stated.unit}, {relation})"
    )


def _claim_nothing(reason: str) -> PrivacyClaim:
    return PrivacyClaim(epsilon=math.inf, delta=None, accountant=None, unit=None, reason=reason)


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
class _ServerNoise:
    """What a wrapper of the server claims, and the ε for those who see its model alone."""

    text: str  # wrapper and its settings, what it claims, and `epsilon` or why there is none
    epsilon: float
    """ε of all recorded rounds against the client's absence; inf with a reason in `text`."""
    claimed_epsilon: float | None
    """Budget of its accountant, or what that has counted; None without an accountant."""


def _read_server_noise(
    strategies: Sequence[DeployedPart],
    exchanges: Sequence[Exchange],
    *,
    mods: Sequence[DeployedPart] | None,
    delta: float,
) -> _ServerNoise | None:
    """Returns what the outermost strategy adds; None if that is no wrapper of Flower's."""
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
    return _ServerNoise(
        text=text, epsilon=epsilon, claimed_epsilon=spent if budget is None else budget
    )


def _find_epsilon(
    strategies: Sequence[DeployedPart],
    exchanges: Sequence[Exchange],
    mods: Sequence[DeployedPart] | None,
    delta: float,
) -> float | str:
    """Returns the ε of all rounds of the client that weighs most, or why there is none."""
    # Flower adds N(0, (z C / n)²) to the mean of n updates clipped to the L2 norm C; a client of
    # weight w in that mean has the multiplier z / (n w). With adaptive clipping the noisy count of
    # clipped updates, which one client moves by 1, is released as well (Andrew et al.,
    # Differentially Private Learning with Adaptive Clipping, NeurIPS 2021).
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
        # Flower moves the norm before it adds noise, which so follows the next norm: that is
        # exp(r (f - q)) times less, for rate r, quantile q and the noisy share f of clipped
        # updates. f exceeds `most` with a chance of half of δ over all rounds.
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
