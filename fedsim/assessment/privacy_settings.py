"""The privacy settings that a tap and a witness found in an app: what they claim, and what holds.

Mods and filters become defenses of the same effect, whose claim is the ledger's. The server's noise
is accounted for those who see its model and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from pydantic import ValidationError

from fedsim.assessment.server_noise import ServerNoise, read_server_noise
from fedsim.assessment.truth import Picked
from fedsim.contracts import plugins
from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.guarantee import Mechanism
from fedsim.contracts.stack import Stack
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.numerics import gaussian
from fedsim.recording.deployed_parts import DeployedPart
from fedsim.recording.exchanges import CHANGED, NO_ROOM, TWICE, Exchange
from fedsim.results.record import Row
from fedsim.scenario import build_stack
from fedsim.scenario.model import PluginRef
from fedsim.types import LocalTraining, PrivacyClaim
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
class FoundDefenses:
    """Defenses that an app's mods or filters are, in the order in which they act on an update."""

    parts: tuple[DeployedPart, ...] = ()
    """Parts, outermost first, without those that change nothing."""
    refs: tuple[PluginRef, ...] = ()
    """Defenses of the last answer."""
    variants: tuple[tuple[PluginRef, ...], ...] = ()
    """Defenses of all answers, which differ where the server sets a norm anew."""
    unproven: str = ""
    """Reason why nothing is proven of them; empty if the ledger is to be asked."""

    @property
    def announcements(self) -> list[dict[str, object]]:
        """Defenses as `AssessSettings.defenses` has them."""
        return [{"name": ref.name, **ref.parameters} for ref in self.refs]


@dataclass(frozen=True)
class PrivacySettings:
    """Privacy settings of one recorded app, as far as its tap and witness found them."""

    defenses: FoundDefenses | None
    """Defenses of the clients; None where no mod was looked for."""
    server: ServerNoise | None
    """The server's own noise; None where no wrapper was found."""
    rounds: int
    """Number of the last recorded round, which bounds the times that a client took part."""

    def describe_privacy(self, each: Picked, training: LocalTraining) -> tuple[Row, list[str]]:
        """Returns the `privacy` of an attacked client against the server, and lines about it.

        It has the fields of a `PrivacyClaim`, with the text `inf` for an infinite ε, and is empty
        where nothing was found that claims any.
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
        self, found: FoundDefenses, exchange: Exchange, training: LocalTraining
    ) -> tuple[PrivacyClaim, str]:
        """Returns the ledger's claim of `found`, and what it comes to against any other update."""
        sent = exchange.read_reply()
        stacks = [build_stack(refs) for refs in found.variants or (found.refs,)]
        for stack in stacks:
            stack.note_shapes(sent.values())
        if found.unproven:
            claimed = stacks[-1].claimed_epsilon
            return replace(_claim_nothing(found.unproven), claimed_epsilon=claimed), ""
        entry = Entry(
            rounds=self.rounds,
            num_examples=max(1, training.batch_size * training.steps),
            delta=_delta_of(found.parts),
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
        exchanges: All recorded exchanges, at least one.
        mods: Message id -> mods of the client that answered, outermost first; None if unknown.
        strategies: The server's strategies, outermost first; None if unknown.
        left_out: Lines that say why the tap left messages out.
    """
    found = _read_defenses(exchanges, mods)
    doubts = [line for line in left_out if line.startswith((TWICE, CHANGED, NO_ROOM))]
    if found and doubts:
        found = replace(found, unproven=f"the tap left answers out: {doubts[0]}")
    rounds = max(each.round for each in exchanges)
    parts = None if found is None else found.parts
    server = read_server_noise(strategies or (), exchanges, mods=parts, delta=_DELTA)
    return PrivacySettings(found, server, rounds)


def _read_defenses(
    exchanges: Sequence[Exchange], mods: Mapping[str, Sequence[DeployedPart] | None]
) -> FoundDefenses | None:
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


def _of_one(parts: Sequence[DeployedPart], exchange: Exchange) -> FoundDefenses:
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
    return FoundDefenses(acting, tuple(refs), unproven=unknown)


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
    # Two clipped updates differ by twice the norm of one, and T rounds compose to one with a
    # multiplier smaller by the root of T.
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


def _delta_of(parts: Sequence[DeployedPart]) -> float:
    """Returns the δ that the first part with one states, or a usual one."""
    stated = (part.number("delta") for part in parts)
    return next((delta for delta in stated if delta is not None and 0 < delta < 1), _DELTA)
