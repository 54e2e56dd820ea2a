"""Defines the kinds of defense, told apart by type; `fedsim.contracts.stack.chain` composes them.

What a defense remembers between rounds is a value that the caller keeps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsim.contracts.guarantee import CurveMechanism, Guarantee, Release, Statistic
from fedsim.contracts.plugins import Plugin
from fedsim.rng import normal as normal
from fedsim.rng import uniform as uniform
from fedsim.types import UNKNOWN, Effect, LocalTraining, ModelSpec, Tensors, Update

LossFn = Callable[[Tensors, Tensor, Tensor], Tensor]
"""Function as described in `LocalStep.loss`."""

FeaturesFn = Callable[[Tensors, Tensor], Tensor]
"""(parameters, normalized images) -> what enters the classifier (B, d). Differentiable in both."""

GradientFn = Callable[[Tensors, Tensor, Tensor, torch.Generator], Tensors]
"""(parameters, images, labels, rng) -> the direction of one local step, named like parameters."""


@dataclass(frozen=True, kw_only=True)
class LocalStep:
    """Holds what a training defense gets to compute the direction of one local step."""

    model: nn.Module
    """Network whose layers have the names of the parameters; its own weights mean nothing."""
    loss: LossFn
    """(parameters, normalized images (B, C, H, W) or rows (B, D), labels) -> mean loss, 0-d. Labels
    are (B,) int64 or (B, K) probabilities. In train mode each call moves the client's batch-norm
    statistics."""
    features: FeaturesFn
    """(parameters, normalized images) -> inputs of the classifier (B, d)."""
    gradient: GradientFn
    """Direction so far: the plain loss's gradient, which a step subtracts, changed by the defenses
    before this."""
    spec: ModelSpec
    """Description of the model: its number of classes, and how its inputs are normalized."""
    batch_size: int
    """Divisor of sums over a batch: the number of its examples, or the mean number where that
    varies with the step. A batch may then be empty."""


class DataDefense(Plugin):
    """Base of defenses that append rows σ I to the rows D (n, d + 1) of a closed-form learner.

    Least squares on all of these is ridge regression with the penalty σ². A sketch D'G, with G
    standard normal, gains σ times a standard normal matrix.
    """

    @abstractmethod
    def sigma(self, release: Release) -> float:
        """Returns σ >= 0 of the rows σ I that a client appends; a FedsimError if none fits."""

    @abstractmethod
    def guarantee(self, release: Release) -> Guarantee:
        """Returns what is proven of `release` with rows σ I added; a FedsimError if no σ fits."""

    @property
    def least_clients(self) -> int:
        """Least number of clients in a sum for `Guarantee.pooled` to hold of it; 1 by default."""
        return 1

    @property
    def assumes(self) -> bool:
        """Whether its claim holds only of data that pass `check`; by default it holds of any."""
        return False

    def check(self, clients: Mapping[int, Tensor]) -> None:
        """Refuses, by a FedsimError, data that contradict what the claim assumes; default: none.

        `clients` maps each client of a release to its rows (n, d + 1) before σ I is appended. The
        refusal is itself a function of the data, and nothing hides it.
        """


class StatisticDefense(Plugin):
    """Base of defenses that privatize a statistic, from which a closed-form release is computed.

    The release is then post-processing: it is private if every statistic that it is computed from
    is. Shape and type of the statistic stay, and a kernel matrix stays positive semidefinite.
    """

    statistic: ClassVar[Statistic]

    @abstractmethod
    def apply(self, value: Tensor, release: Release, rng: torch.Generator) -> Tensor:
        """Returns the private version of a client's statistic `value`, which is not changed.

        `value` is features (n, d) or a kernel matrix (n, n), of which `release` has the bounds.
        `rng`, on the CPU, is the only source of randomness; noise is drawn as in
        `UpdateDefense.apply`. It raises a FedsimError if no noise keeps to the claim.
        """

    @abstractmethod
    def guarantee(self, release: Release) -> CurveMechanism:
        """Returns what is proven of the private statistic; a FedsimError if nothing can be."""

    @property
    def assumes(self) -> bool:
        """Whether its claim holds only of data that pass `check`; by default it holds of any."""
        return False

    def check(self, client: int, value: Tensor) -> None:
        """Refuses, by a FedsimError, a client's statistic that voids the claim; by default none."""

    @abstractmethod
    def public_parameters(self, release: Release) -> Mapping[str, float]:
        """Returns the parameters of the private statistic's distribution; it fails as `apply` does.

        Attacks know these names, and treat a defense with others as unknown. Truncated Laplace
        noise on each entry of features has `scale` b and `bound` B. A kernel matrix K that becomes
        the covariance of k draws of N(0, K + γ I) has `samples` k and `lift` γ.
        """


class UpdateDefense(Plugin):
    """Base of defenses that change the update before it leaves the client, by pure functions.

    Only floating-point tensors are ever handed to a defense; integer ones pass by unchanged.
    """

    deployed_parts: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Import name of another framework's mod or filter that does the same -> its settings: name
    there -> parameter here. A tap that finds one in an app takes it for this defense."""

    @property
    def claimed_epsilon(self) -> float | None:
        """ε that the parameters state as their budget, proven or not; None (default): none."""
        return None

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        """Returns the state before the first round, for updates shaped like `update`; default {}.

        `sensitivity` is the L2 bound on them that earlier defenses guarantee; inf if none does.
        """
        return {}

    @abstractmethod
    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Returns (defended update, next state), with unchanged names, order, shapes and types.

        Arguments are not changed. `state` is what `init` or the previous round returned. `rng`, on
        the CPU, is the only source of randomness. Noise that protects is drawn from it by `normal`
        and `uniform` of this module; torch's own draws can be predicted.
        """

    @abstractmethod
    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns what is proven after this defense, given what was proven `before` it.

        It raises a FedsimError if the defense cannot follow what comes before it.
        """

    def effect(self, before: Guarantee) -> Effect:
        """Returns what the defense does to an update of which `before` is proven, for attacks.

        The default is UNKNOWN: attacks then assume noise of unknown size, so that the defense looks
        safer than it is.
        """
        return UNKNOWN

    def public_parameters(self, before: Guarantee) -> Mapping[str, float]:
        """Returns parameters that follow from declared ones and `before`; none by default.

        They replace those in observations. `before` is proven of the update that enters.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class AskedEpsilon:
    """Holds an ε that a scenario asks for in place of a noise."""

    epsilon: float
    """ε after all rounds, of the client that is worst off."""
    delta: float | None
    """δ of the claim; None for that of the ledger (`privacy.delta`)."""


class TrainingDefense(Plugin):
    """Base of defenses that change how the client trains; by default nothing is changed."""

    from_loss: ClassVar[bool] = False
    """Whether its direction is computed from the loss, whatever the direction so far."""

    @property
    def target(self) -> AskedEpsilon | None:
        """ε for which this defense's noise has to be found; None, the default, for declared noise.

        A defense with a target proves an ε of ∞, and its `gradient` is a FedsimError; only its copy
        from `with_noise` trains.
        """
        return None

    def with_noise(self, multiplier: float) -> TrainingDefense:
        """Returns a copy of the same `target`, with noise of this `multiplier`.

        Its standard deviation is `multiplier` times the clipping bound. A defense with a target
        overrides this: the default raises a NotImplementedError.
        """
        raise NotImplementedError(f"{type(self).__name__} has a target and takes no noise")

    def training(self, declared: LocalTraining) -> LocalTraining:
        """Returns the local training that this defense makes of `declared`; by default the same."""
        return declared

    def gradient(self, step: LocalStep) -> GradientFn:
        """Returns the function that gives the direction of a `step`; by default `step.gradient`.

        It maps (parameters, images, labels, rng) to tensors named like the parameters. Its rng is
        on the CPU, its images perhaps on a GPU. Noise that protects is drawn as in
        `UpdateDefense.apply`. It raises a FedsimError if noise for a `target` is not found yet.
        """
        return step.gradient

    @abstractmethod
    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """Returns what is proven of the update, given what was proven `before` this defense.

        `training` is that after all training defenses of the stack, later ones included.
        """

    def effect(self, training: LocalTraining) -> Effect:
        """Returns what it does to the update beyond changing `training`; by default UNKNOWN.

        `training` is that after all training defenses of the stack.
        """
        return UNKNOWN


class StatefulTrainingDefense(TrainingDefense):
    """Base of training defenses whose steps depend on a client's earlier ones over all rounds."""

    @abstractmethod
    def gradient_with_memory(self, step: LocalStep, memory: dict[str, Tensor]) -> GradientFn:
        """Returns the function that gives the direction of a local `step`, as `gradient` does.

        It may read and replace entries of the client's `memory`, which is empty before its first
        step and kept between rounds.
        """

    def gradient(self, step: LocalStep) -> GradientFn:
        """Returns the function of `gradient_with_memory` for a client that has taken no step."""
        return self.gradient_with_memory(step, {})


class LossTerm(nn.Module, ABC):
    """Base of layers that add a term to the loss of the model that they are part of."""

    @abstractmethod
    def loss_term(self) -> Tensor:
        """Returns the term, 0-d, for the batch of the last call of `forward`, which has to precede.

        It is the mean of the examples' own terms, as some defenses clip each example's gradient.
        """


class ModelDefense(Plugin):
    """Base of defenses that alter the model that clients train, and with a `LossTerm` its loss.

    Nothing is proven by it, and what other defenses prove stays: they act on the altered model.
    """

    @abstractmethod
    def wrap(self, body: nn.Module, head: nn.Module, features: int) -> tuple[nn.Module, nn.Module]:
        """Returns the altered (body, head) of a model that was just built.

        `body` computes `features` entries of (B, C, H, W), which are then flattened; `head`
        computes logits (B, K) from these. New weights are drawn from torch's global stream.
        Parameters keep their names where the parts that hold them stay in place. Attacks on the
        classifier look for the last parameters `head.output.weight` and `head.output.bias`.
        """

    def effect(self, training: LocalTraining) -> Effect:
        """Returns what it does to an update besides altering the model; by default UNKNOWN.

        `training` is that after all training defenses of the stack.
        """
        return UNKNOWN


class AggregationDefense(Plugin):
    """Base of defenses that show the server one combined update, not each client's."""

    averages: ClassVar[bool] = False
    """Whether the combination, with the server's noise if any, is a mean in which clients with the
    same number of examples have the same weight. A client can then take its own update off."""

    @abstractmethod
    def combine(self, updates: Iterable[Update]) -> Update:
        """Returns the one update that the server sees, and consumes `updates`, one after another.

        A `NoisyAggregation` returns it without noise. `num_examples` of the result is the sum of
        theirs; tensors and buffers share no memory with theirs. A FedsimError says that there are
        no updates, or that they do not combine (as with different names or shapes).
        """

    def seen_by_one_of(self, participants: int) -> AggregationDefense:
        """Returns the aggregation as one of so many `participants` sees it, without its own update.

        The default returns this one: others stay hidden as before.
        """
        return self

    @abstractmethod
    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns what is proven of the combined update; `before` is proven of each one."""

    def effect(self, before: Guarantee) -> Effect:
        """Returns what is added to the plain sum or mean of the updates; by default UNKNOWN."""
        return UNKNOWN


@dataclass(frozen=True, kw_only=True)
class ServerRound:
    """Holds what the server's noise in a round depends on, whichever clients answer."""

    clients: int
    """Number of clients that are asked."""
    sensitivity: float
    """L2 bound on one client's update."""
    stream: torch.Generator
    """Stream of this round's noise."""
    before: torch.Generator | None
    """Stream of the round before, again from its start; None in the first round."""


class NoisyAggregation(AggregationDefense):
    """Base of aggregations by a trusted server that adds noise of its own to what it shows."""

    @abstractmethod
    def add_noise(self, combined: Update, round: ServerRound) -> Update:
        """Returns the mean that the server shows: `combined`, which `combine` returned, with noise.

        A sum is divided by `round.clients`. `combined` is not changed. The streams of `round` are
        the only randomness, and are drawn from as in `UpdateDefense.apply`.
        """


@dataclass(frozen=True, kw_only=True)
class SumTerms:
    """Holds the public terms of a secure sum, none of which the server chooses."""

    threshold: float
    """Share of a round's participants that has to be in a sum; above 1/2."""
    colluding: float
    """Share of the participants that may tell the server all they know."""
    range: float
    """Bound on the entries of an update, which are clipped to [-range, range]."""
    buffer_range: float
    """Bound on the entries of buffers, which are clipped to [-buffer_range, buffer_range]."""
    most_examples: int
    """Maximum number of examples of a client, whose weight in a sum is its number over this one."""
    norm: float
    """L2 bound on an update that noise is made for; inf without noise."""
    noise: float
    """Standard deviation of the noise on an entry of a sum with the fewest honest clients allowed.
    The sum is that of clipped updates, each times its weight."""

    def client_noise(self, participants: int) -> float:
        """Returns the standard deviation of each client's noise on an entry of its weighted update.

        `participants` >= 1 is their number in the round; `threshold` has to exceed `colluding`.
        """
        # At least so many honest clients are in a sum, and their variances add up to `noise`².
        return self.noise / math.sqrt(participants * (self.threshold - self.colluding))


class MaskedAggregation(NoisyAggregation):
    """Base of aggregations by a protocol in which the server sees masked vectors and their sum.

    The federation runs the protocol (`fedsim.federation.secure_aggregation`). `combine` and
    `add_noise` compute what it comes to, without masks.
    """

    @abstractmethod
    def terms(self, before: Guarantee, most_examples: int) -> SumTerms:
        """Returns the terms of a secure sum of updates of which `before` is proven.

        `most_examples` is the largest number that a client can report. It raises a FedsimError if
        nothing bounds what a client adds.
        """


Defense = (
    DataDefense
    | StatisticDefense
    | UpdateDefense
    | TrainingDefense
    | ModelDefense
    | AggregationDefense
)


def global_norm(update: Tensors) -> Tensor:
    """Returns the L2 norm of all tensors together, 0-d float64 on their device; 0 for none."""
    # In float64, since squares of float16 overflow, and a bound that is proven has to hold.
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in update.values()]
    return (
        torch.linalg.vector_norm(torch.stack(norms))
        if norms
        else torch.zeros((), dtype=torch.float64)
    )


def all_finite(update: Tensors) -> bool:
    """Returns whether every entry of `update` is finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in update.values())


def add_gaussian(update: Tensors, std: float, rng: torch.Generator) -> Tensors:
    """Returns `update` plus N(0, std^2) on every entry, see `standard_normal` and `add_noise`.

    A `std` of 0 draws nothing and returns the same tensors; a negative one is a ValueError.
    """
    if std == 0:
        return dict(update)
    return add_noise(update, std, standard_normal(update, rng))


def standard_normal(like: Tensors, rng: torch.Generator) -> dict[str, Tensor]:
    """Returns float64 draws of N(0, 1), of the names, shapes and devices of `like`.

    `rng` is on the CPU. They protect only if it is a `fedsim.rng.Stream`; draws from another are
    torch's, and can be predicted.
    """
    return {
        # Drawn on the CPU and moved, so that every device adds the same noise.
        name: normal(tensor.shape, rng, torch.float64).to(tensor.device)
        for name, tensor in like.items()
    }


def add_noise(update: Tensors, std: float, noise: Tensors) -> dict[str, Tensor]:
    """Returns `update` plus `std` > 0 times the float64 `noise` of its names, without its low bits.

    The low bits of a float tell which values it can be a noisy version of: see Mironov, On
    Significance of the Least Significant Bits for Differential Privacy, CCS 2012. So the float64
    sum is rounded to a multiple of at most `std` / 2^18, then to the type of the update.
    """
    return {
        name: without_low_bits(tensor.double() + std * noise[name], std).to(tensor.dtype)
        for name, tensor in update.items()
    }


def without_low_bits(noisy: Tensor, scale: float) -> Tensor:
    """Returns float64 `noisy`, rounded to multiples of a power of two of at most `scale` / 2^18.

    `scale` > 0 is the standard deviation of its noise. NaN and infinity stay.
    """
    # A power of two, so that dividing and multiplying by it are exact.
    return _rounded_to(2.0 ** (math.floor(math.log2(scale)) - _STEP_BITS), noisy)


def shapes(update: Tensors) -> Mapping[str, torch.Size]:
    """Returns the shape of each tensor of `update`, by name."""
    return {name: tensor.shape for name, tensor in update.items()}


_STEP_BITS = 18
"""Number of powers of two by which steps of `add_noise` are finer than the noise's deviation. Near
0, noise can have 10^9 values within one such step; beyond 6.8 deviations, where one entry in 10^11
lies, few or none."""


def _rounded_to(step: float, values: Tensor) -> Tensor:
    """Returns the nearest multiples of `step`; NaN and large values, which are multiples, stay."""
    # From 2^52 steps on, each float64 is a multiple of the step; for NaN the comparison is false.
    return torch.where(values.abs() < 2.0**52 * step, (values / step).round() * step, values)
