"""The ledger: what a whole defense stack claims after all its rounds, never by a guess.

Without sampling, T Gaussian releases are one Gaussian release with noise multiplier z / sqrt(T),
whose curve is exact. Batches sampled without replacement are accounted by Rényi divergences (Wang,
Balle and Kasiviswanathan, Subsampled Rényi Differential Privacy and Analytical Moments Accountant,
AISTATS 2019, Theorem 27) as implemented by dp_accounting. Noise that is correlated between steps is
one Gaussian release of them all (`fedsim.privacy.composition.correlated`). Where examples are drawn
independently of each other, the claim is that of the calculator's `correlated_gaussian`.

The claim covers the update itself. A client's number of examples and reported loss, its taking
part, and the choice of hyper-parameters are outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fedsim.contracts.guarantee import Composed, Mechanism, Proven, Release
from fedsim.contracts.stack import Stack
from fedsim.privacy.composition import curves
from fedsim.privacy.numerics import gaussian
from fedsim.types import FedsimError, LocalTraining, PrivacyClaim, Unit
from fedsim.words import number_of

if TYPE_CHECKING:
    from fedsim.privacy.mechanisms.correlated_gaussian import StepSampling

EXACT = "exact Gaussian"
OF_SERVER = f"{EXACT}, correlated noise of the server"
RENYI = "RDP, sampled without replacement"

_LARGEST = 1e9
"""Least ε that is stated as infinite: so little noise may be lost in the update's rounding."""
_LEAST = 1e-12
"""Smallest noise multiplier for which ε is stated: below, it would be above 1e23."""
_AMPLIFIED = (0.02, 1e5)
"""Noise multipliers whose Rényi divergences are computed: below they amplify nothing, and above
rounding is larger than they are, so that the end of the range stands for all beyond it."""
_ROUNDING = 1e-5
"""Relative rounding of a Rényi divergence, by which it is enlarged."""
_LONGEST = 100_000
"""Most steps whose correlation or sampling is accounted; more are bounded as if in every batch."""
_PATIENCE = 10_000_000_000
"""Numbers that a claim of a run may take: about a minute."""
_BALLS_PATIENCE = 1_500_000_000
"""Numbers that a claim of balls-in-bins may take: about a second."""
_BALLS_DRAWS = (25_000, 200_000)
"""Fewest and most draws of balls-in-bins. Few draws widen the interval and raise the claim."""
_INDEPENDENT = ("poisson", "balls_in_bins")
"""Samplings under which no example's presence depends on another's."""


@dataclass(frozen=True, kw_only=True)
class ProbeReleases:
    """Counts a client's answers to probes of one size: `count` batches, `releases` times each."""

    declared: LocalTraining
    """The local training of a probe, before the stack's training defenses."""
    count: int
    releases: int = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Lists the releases of one client, and the δ at which they are accounted."""

    rounds: int
    """Rounds in which the client released the result of its batches once."""
    repeated_rounds: int = 0
    """Rounds in which the client released the result of its batches `repeats` times. Noise is drawn
    anew and batches are not, so that sampling amplifies these releases together."""
    repeats: int = 1
    num_examples: int
    delta: float
    """δ, in (0, 1)."""
    buffers_released: bool = False
    """Whether clients also send batch-norm statistics, which no defense protects."""
    release: Release | None = None
    """The release that a closed-form learner makes of all of a client's rows in each round; None
    for a learner that trains."""
    schedules: Collection[tuple[bool, ...]] = ()
    """Whether a client took part in each round so far, a tuple for each client. Only noise of the
    server that is correlated over rounds depends on it. Empty: one client took part in all."""
    private_statistics: Mapping[Unit, Collection[str]] = field(default_factory=dict)
    """Names, by unit, of quantities that clients compute with and that the unit's data influenced
    without noise. A unit then moves more than its own contribution, and nothing is claimed."""
    probes: Collection[ProbeReleases] = ()
    """Answers to probes, which count besides the rounds."""
    unprotected: Collection[str] = ()
    """Names of tensors that clients release and no defense acts on; of any, nothing is claimed."""
    drawn: bool = False
    """Whether the example is known to be in every batch, so that drawing batches hides nothing."""
    known: float = 0.0
    """ε that another client spends anyway. A quick bound of at most `known` is stated in place of a
    slower and tighter one."""


def claim(stack: Stack, declared: LocalTraining, entry: Entry) -> PrivacyClaim:
    """Returns the guarantee of `stack` to the client of `entry`.

    `declared` is the local training before the stack's training defenses. Where nothing is
    guaranteed ε is inf, `delta` and `unit` are None, and `reason` says why. A FedsimError says that
    the stack is contradictory, δ not in (0, 1), or a sampled batch larger than the client's data.
    """
    return replace(_claim_of(stack, declared, entry), claimed_epsilon=stack.claimed_epsilon)


def _claim_of(stack: Stack, declared: LocalTraining, entry: Entry) -> PrivacyClaim:
    delta, rounds = entry.delta, entry.rounds + entry.repeated_rounds
    if not 0 < delta < 1:
        raise FedsimError(f"privacy.delta: {delta} is not a probability above 0 and below 1")
    # The last guarantee is that of the whole stack: each defense extends what holds before it.
    held = stack.guarantees(declared, entry.release)[-1]
    mechanism = _ignore_sampling(held.mechanism, entry)
    if mechanism is None:
        return _claim_nothing(held.reason)
    if reason := _not_covered(mechanism, entry):
        return _claim_nothing(reason)
    if not isinstance(mechanism, Mechanism):
        probes = sum(probe.count * probe.releases for probe in entry.probes)
        # Nothing is sampled here, so that every release counts, repeated ones and probes as well.
        releases = entry.rounds + entry.repeated_rounds * entry.repeats + probes
        if isinstance(mechanism, Composed):
            epsilon = curves.of_mechanisms(mechanism.parts * releases, delta)
        else:
            epsilon = mechanism.epsilon(delta, releases) if releases else 0.0
        accountant = mechanism.accountant
    elif mechanism.shared and mechanism.correlation:
        # A frozen set is hashable for the cache, and keeps equal schedules once.
        taken = frozenset(entry.schedules or [(True,) * rounds])
        epsilon, accountant = _of_the_server(mechanism, taken, delta), OF_SERVER
    else:
        training, held_examples = stack.training(declared), entry.num_examples
        if mechanism.sampling and training.batch_size > held_examples:
            raise FedsimError(
                f"training.local.batch_size: a batch of {training.batch_size} is larger than the "
                f"client's data ({number_of(held_examples, 'example')}); use a smaller batch"
            )
        spent = [
            _Batches(mechanism, entry.rounds, 1, training.batch_size),
            _Batches(mechanism, entry.repeated_rounds, entry.repeats, training.batch_size),
        ]
        for probe in entry.probes:
            probed = _ignore_sampling(
                stack.guarantees(probe.declared, entry.release)[-1].mechanism, entry
            )
            # Guarantees for different kinds of neighbours do not compose.
            if not isinstance(probed, Mechanism) or probed.relation != mechanism.relation:
                return _claim_nothing(_PROBED)
            size = stack.training(probe.declared).batch_size
            spent.append(_Batches(probed, probe.count, probe.releases, size))
        if mechanism.sampling in _INDEPENDENT:
            epsilon, accountant = of_steps(
                mechanism,
                training,
                rounds=rounds,
                num_examples=held_examples,
                delta=delta,
                known=entry.known,
            )
        else:
            epsilon, accountant = _compose(tuple(spent), held_examples, delta)
    # Written so that a NaN is refused as well.
    if not epsilon < _LARGEST:
        return _claim_nothing(f"the noise is too small for a finite ε (below {_LARGEST:g})")
    return PrivacyClaim(
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        unit=mechanism.unit,
        relation=mechanism.relation,
        reason=None,
        covers=mechanism.holds if isinstance(mechanism, Mechanism) else "",
    )


def _ignore_sampling(mechanism: Proven | None, entry: Entry) -> Proven | None:
    if entry.drawn and isinstance(mechanism, Mechanism):
        return replace(mechanism, sampling=None)
    return mechanism


def _not_covered(mechanism: Proven, entry: Entry) -> str | None:
    """Returns why nothing is proven for the releases of `entry` by `mechanism`; None if it is."""
    moving = entry.private_statistics.get(mechanism.unit, ())
    is_composed_once = isinstance(mechanism, Mechanism) and bool(
        mechanism.correlation or mechanism.sampling in _INDEPENDENT
    )
    cases = {
        f"one {mechanism.unit} moves what all compute, through what was computed from "
        f"clients' data without noise: {'; '.join(moving)}": bool(moving),
        "clients release batch-norm statistics, which the defense does not protect; "
        "choose the model's norm: group": entry.buffers_released,
        "clients release tensors that no defense acts on, for they hold no floating-point "
        f"numbers: {', '.join(entry.unprotected)}; let the learner release these as floats": bool(
            entry.unprotected
        ),
        _PROBED: is_composed_once and bool(entry.probes),
        _REPEATED: is_composed_once and entry.repeated_rounds > 0 and entry.repeats > 1,
    }
    return next((reason for reason, is_so in cases.items() if is_so), None)


def of_steps(
    mechanism: Mechanism,
    training: LocalTraining,
    *,
    rounds: int,
    num_examples: int,
    delta: float,
    known: float = 0.0,
) -> tuple[float, str]:
    """Returns (ε, its accountant's name) of `rounds` rounds whose steps release by `mechanism`.

    ε is inf where the noise is too small for a finite one, and 0 without any release.

    Args:
        mechanism: the Gaussian mechanism of a step; `releases` is the number of steps of a round.
            Under sampling by `poisson` or `balls_in_bins` its relation has to be `zero_out`.
        training: local training after the stack's training defenses.
        rounds: rounds that the client takes part in.
        num_examples: number of examples that the client holds, at least a batch.
        delta: in (0, 1).
        known: ε that another client spends anyway, see `Entry.known`.
    """
    if mechanism.sampling not in _INDEPENDENT:
        spent = _Batches(mechanism, rounds, 1, training.batch_size)
        return _compose((spent,), num_examples, delta)
    sampling = mechanism.sampling
    assert mechanism.relation == "zero_out", "an example that is drawn is there or not"
    balls = sampling == "balls_in_bins"
    rate = 1 / training.bins(num_examples) if balls else training.batch_size / num_examples
    steps = rounds * mechanism.releases
    # This bound takes no draws. If another client spends as
    # much anyway, drawing would change nothing.
    if balls and known > 0:
        bound, accountant = _of_curve(mechanism, steps, sampling, rate, delta, draw=False)
        if bound <= known:
            return bound, accountant
    return _of_curve(mechanism, steps, sampling, rate, delta)


_PROBED = (
    "probes are not accounted together with correlated noise, nor with sampling by poisson or "
    "balls_in_bins; declare them outside of the deployment (privacy.probes: outside)"
)
_REPEATED = (
    "several releases of the same batch are not accounted for correlated noise, nor for sampling "
    "by poisson or balls_in_bins; set observe.releases: 1"
)


def worst_client_sizes(training: LocalTraining, held: Iterable[int]) -> list[int]:
    """Returns client sizes, in rising order, among which the largest ε is attained.

    `held` has the number of examples of each client, and at least one client. `training` is the
    local training after the stack's training defenses.
    """
    if training.sampling != "balls_in_bins":
        return [min(held)]
    # Fewer bins are not proven to be worse, so that the smallest size of each number is kept.
    least = {training.bins(count): count for count in sorted(held, reverse=True)}
    return sorted(least.values())


def _claim_nothing(reason: str) -> PrivacyClaim:
    return PrivacyClaim(epsilon=math.inf, delta=None, accountant=None, unit=None, reason=reason)


@dataclass(frozen=True)
class _Batches:
    """Releases of one kind: `batches` batches of one size, each released `repeats` times."""

    mechanism: Mechanism
    batches: int
    repeats: int
    batch_size: int

    @property
    def drawn(self) -> int:
        """Number of batches over all local steps."""
        return self.batches * self.mechanism.releases

    def reach(self, num_examples: int) -> int:
        """Returns the most of these batches that one of a client's `num_examples` can be in."""
        if self.mechanism.sampling != "epochs":
            return self.drawn
        # Each round begins an epoch, and no epoch takes an example twice. The order is drawn
        # without a look at the data, so that all other batches are alike in both worlds.
        each = max(1, num_examples // self.batch_size)
        return self.batches * math.ceil(self.mechanism.releases / each)

    @property
    def multiplier(self) -> float:
        return self.mechanism.noise_multiplier / self.mechanism.reach


@lru_cache(maxsize=4096)
def _compose(parts: tuple[_Batches, ...], num_examples: int, delta: float) -> tuple[float, str]:
    """Computes (ε, accountant) of all `parts` together: the least valid bound."""
    parts = tuple(part for part in parts if part.drawn and part.repeats)
    if not parts:
        return 0.0, EXACT
    first = parts[0].mechanism
    # Correlated noise makes one release of all steps. `_not_covered` refuses probes and repeats
    # here, so that all parts are of one mechanism and batch size.
    if first.correlation:
        steps = sum(part.drawn * part.repeats for part in parts)
        if first.sampling in (None, "epochs") or parts[0].batch_size >= num_examples:
            return _of_curve(first, steps, "full", 1.0, delta)
        return _of_curve(first, steps, "fixed_size", parts[0].batch_size / num_examples, delta)
    # Gaussian releases of one example compose to one, of the sum of their squared ratios.
    reached = [part.reach(num_examples) for part in parts]
    ratios = [
        math.sqrt(count * part.repeats) / part.multiplier
        for part, count in zip(parts, reached, strict=True)
    ]
    exact = _gaussian(1 / math.hypot(*ratios), delta)
    sampled = [
        part.mechanism.sampling == "without_replacement" and part.batch_size < num_examples
        for part in parts
    ]
    singles = [part.multiplier / math.sqrt(part.repeats) for part in parts]
    if not any(sampled) or min(singles) < _AMPLIFIED[0]:
        return exact, EXACT
    # Divergences of all parts add up at each order; the order is chosen once, for the total.
    from dp_accounting.rdp import compute_epsilon

    # k releases of one batch are one with a noise multiplier of z / sqrt(k).
    orders: tuple[float, ...] = ()
    total = np.zeros(())
    for part, count, hides, single in zip(parts, reached, sampled, singles, strict=True):
        size = min(part.batch_size, num_examples)
        orders, divergences = _renyi(single, size if hides else 1, num_examples if hides else 1)
        total = total + count * np.array(divergences)
    amplified = float(compute_epsilon(orders, list(total), delta)[0])
    # Whatever the batches, at most one example differs between them: the exact curve holds too.
    return (amplified, RENYI) if amplified < exact else (exact, EXACT)


def _of_all_batches(mechanism: Mechanism, steps: int, delta: float) -> tuple[float, str]:
    """Computes (ε, accountant) of an example that may be in every batch."""
    # ||C z|| is at most sqrt(T) / (1 - λ): no singular value of C reaches 1 / (1 - λ).
    reach = mechanism.reach * math.sqrt(steps) / (1 - mechanism.correlation)
    suffix = ", correlated noise" if mechanism.correlation else ""
    found = _gaussian(mechanism.noise_multiplier / reach, delta)
    return found, f"{EXACT}, every batch{suffix}"


@lru_cache(maxsize=4096)
def _of_the_server(
    mechanism: Mechanism, schedules: frozenset[tuple[bool, ...]], delta: float
) -> float:
    from fedsim.privacy.composition.correlated import reach

    farthest = mechanism.reach * reach(schedules, mechanism.correlation)
    return _gaussian(mechanism.noise_multiplier / farthest, delta) if farthest else 0.0


def _gaussian(multiplier: float, delta: float) -> float:
    return float(gaussian.epsilon(multiplier, delta)) if multiplier >= _LEAST else math.inf


@lru_cache(maxsize=4096)
def _of_curve(
    mechanism: Mechanism,
    steps: int,
    sampling: StepSampling,
    rate: float,
    delta: float,
    *,
    draw: bool = True,
) -> tuple[float, str]:
    """Returns (ε, accountant) by `correlated_gaussian`; batches count as known unless `draw`."""
    from fedsim.privacy.composition.dominating_pair import BallsInBins, TooFewDraws
    from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCurve
    from fedsim.privacy.numerics.work import TooMuchWork

    if steps == 0:
        return 0.0, EXACT
    if steps > _LONGEST or mechanism.noise_multiplier < _LEAST:
        return _of_all_batches(mechanism, steps, delta)
    patience, draws = _PATIENCE, None
    if sampling == "balls_in_bins":
        # As many draws as the patience allows: a search for noise asks for many claims.
        each = BallsInBins(steps, round(1 / rate), mechanism.correlation).work(1)
        few, many = _BALLS_DRAWS
        draws, patience = min(max(_BALLS_PATIENCE // each, few), many), _BALLS_PATIENCE
    curve = CorrelatedCurve(
        steps=steps,
        sampling_rate=rate,
        correlation=mechanism.correlation,
        sampling=sampling,
        relation=mechanism.relation,
        noise_multiplier=mechanism.noise_multiplier,
        draws=draws,
    )
    if not draw:
        return curve.claim_revealed(delta)
    suffix = ", correlated noise" if mechanism.correlation else ""
    if mechanism.noise_multiplier < _AMPLIFIED[0]:
        patience = 0  # a batch shows who is in it, and draws would show no more
    try:
        epsilon, method = curve.claim(delta, patience)
    # Known batches are bounded without draws, and never too low.
    except (TooFewDraws, TooMuchWork):
        epsilon, method = curve.claim_revealed(delta)
    return epsilon, f"{method}{suffix}"


@cache
def _renyi(
    multiplier: float, batch_size: int, num_examples: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Computes (orders, Rényi divergences) of a batch sampled without replacement."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
    from dp_accounting.rdp import RdpAccountant

    # The multiplier is relative to the sensitivity of replacing one example: unlike the PLD
    # accountant, this one does not double it (`_compute_rdp_sample_wor_gaussian`).
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    # Less noise is less private: the divergences of the end of the range hold beyond it.
    multiplier = min(multiplier, _AMPLIFIED[1])
    # Without sampling the divergence of order α is α / (2 z²),
    # which is also the cap of a sampled one.
    orders = tuple(map(float, accountant._orders))
    whole = np.array(orders) / (2 * multiplier**2)
    if batch_size == num_examples:
        return orders, tuple(whole)
    accountant.compose(
        SampledWithoutReplacementDpEvent(num_examples, batch_size, GaussianDpEvent(multiplier))
    )
    # Divergences add up over releases, and computing them is the slow part: read them once. One
    # that rounding has taken below 0 would count as no loss; the whole data's is never exceeded.
    found = np.array(accountant._rdp, dtype=np.float64) * (1 + _ROUNDING)
    sound = np.isfinite(found) & (found > 0)
    return orders, tuple(np.where(sound, np.minimum(found, whole), whole))
