"""The expected gain of the best matching attack, of three terms, none of which runs an attack.

Mean squared errors add up, in units of the guess's own:

    error = min over μ >= λ_2 / T² of Σ w_i (μ / (λ_i + μ))² + |(J'J + μ)^-1 J'e|² / |d|²
            + t_s²
    gain  = the mean of -10 log10(error) dB over batches

- The first sum is what T steps leave undone. λ_i and w_i are eigenvalues of J'J and the shares of
  the way d from truth to guess in them; J is the derivative of the update by the images. To stop an
  accelerated descent after T steps is to regularize with μ = λ / T², λ being the largest (Pagliana
  and Rosasco, Implicit regularization of accelerated methods, NeurIPS 2019), so that large
  batches, many local steps and deep models, whose λ_i fall off fast, stay near the guess. An
  outlier costs a conjugate method one step (Axelsson and Lindskog, On the rate of convergence of
  the preconditioned conjugate gradient method, 1986), and every classifier makes one, by the
  factor p - y of an image's whole gradient: so the largest that counts is λ_2.
- The second is what noise and pruning displace: e is Gaussian noise of the declared deviation, or
  what the stack makes of a real update. The attacker regularizes as is best for both sums (ridge
  regression; Hoerl and Kennard 1970).
- t_s is the share of the way at which descents stall (`_slope_share`). In networks whose units
  switch, the gradient jumps; the slope of the objective shows no jump, and next to the truth jumps
  are most of the distance.

Clipping hides the update's length. Squared distances are then held to a wrong one, and what is left
is to match the direction by signs of slopes, which is not accelerated: μ >= λ_2 / T.

A closed form needs no descent: T is then infinite, and t_s is 0. So is t_s of the exact gradient of
one image in a dense first layer, each row of which is a multiple of the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.stack import Stack
from fedsim.forecasting.plan import UpdatePlan
from fedsim.learners.sgd import train
from fedsim.models.base import Classifier
from fedsim.models.local import gradient, local_update, loss_function, step_weights
from fedsim.models.victim import rebuild
from fedsim.types import Effect, LocalTraining, Noise, Observation, Tensors


def _is_altered(effect: Effect) -> bool:
    """Returns whether more than noise and clipping changes what is seen of an update."""
    # Of what is not exact, noise alone leaves every entry its part of the truth.
    return not replace(effect, noise=(), drawn=False).exact


def _is_plain(plan: UpdatePlan) -> bool:
    """Returns whether a single gradient is seen, behind noise and clipping at most."""
    return not _is_altered(plan.first.effect) and plan.training.algorithm == "fedsgd"


def _reads_in_closed_form(plan: UpdatePlan) -> bool:
    """Returns whether the first layer's update gives images away without a search."""
    spec = plan.first.model
    if not _is_plain(plan) or spec.parameters.get("imprint"):
        return _is_plain(plan)
    hidden = spec.parameters.get("hidden", 32)
    return spec.name == "kan" and plan.first.num_images <= int(hidden)


def _rows_are_the_image(plan: UpdatePlan) -> bool:
    """Returns whether each row of a first layer's gradient is a multiple of the only image."""
    first = plan.first
    if not _is_plain(plan) or first.num_images != 1:
        return False
    weight = next((value for value in first.parameters.values() if value.ndim > 1), None)
    pixels = math.prod(first.model.input_shape)
    return weight is not None and weight.ndim == 2 and weight.shape[1] == pixels


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """What defenses make of a computed update u: y, seen, with y / scale = u + error + noise."""

    scale: float
    """The factor of clipping, above 0 to 1; 1 where nothing is scaled."""
    error: Tensor | None
    """(m,) float64 change beside scaling, with m entries of an update. None where noise is all."""
    std: float
    """Standard deviation of noise in an entry of y / scale; 0 where `error` includes it."""


def disturbance(
    plan: UpdatePlan, observation: Observation, model: Classifier, images: Tensor, labels: Tensor
) -> Disturbance:
    """Returns what a plan's stack does to a batch's update, ordered as `observation.parameters`.

    Args:
        plan: Plan with the stack, and the training before its defenses.
        observation: An observation of the plan, whose weights the update starts from.
        model: The observation's model; it is set to float32 in place.
        images: Normalized images (N, C, H, W), of all clients one after another.
        labels: (N,) int64 classes of `images`.
    """
    effect, clients = observation.effect, observation.num_clients
    altered = _is_altered(effect)
    scaled = effect.scaled or effect.scaled_examples
    std = noise_std(effect.noise, observation.training, clients)
    if not altered and not scaled:
        return Disturbance(scale=1.0, error=None, std=std)
    plain: list[Tensors] = []
    defended: list[Tensors] = []
    state, names = model.to(torch.float32), tuple(observation.parameters)
    groups = zip(images.float().chunk(clients), labels.chunk(clients), strict=True)
    for number, (x, y) in enumerate(groups):
        # Each client's update twice: as computed, and as its stack makes it. Both draw the same
        # chance in training, so that only the stack sets them apart.
        for bare, kept in ((True, plain), (False, defended)):
            stream = rng.generator(observation.seed, "disturbance", number)
            kept.append(_update(plan, observation, state, x, y, stream, bare=bare))
    computed = torch.stack([flat(each, names) for each in plain]).mean(0).double()
    seen = torch.stack([flat(each, names) for each in defended]).mean(0).double()
    scale = 1.0
    if effect.scaled_examples or (scaled and effect.bound is None):
        # Clipped examples have no common factor, and an unknown bound tells none: it is measured.
        # It is that of what was computed, less two deviations of what noise adds to it.
        norm = max(float(computed.norm()), 1e-30)
        factor = float(seen @ computed) / norm**2 - 2 * std / norm
        scale = min(1.0, max(factor, 1e-6))
    elif scaled:
        assert effect.bound is not None
        # A clipped update has a known factor, which the mean averages over clients.
        norms = [float(flat(each, names).norm()) for each in plain]
        scale = sum(min(1.0, effect.bound / max(n, 1e-30)) for n in norms) / len(norms)
    return Disturbance(
        scale=scale,
        error=seen / scale - computed if altered else None,
        std=0.0 if altered else std / scale,
    )


def noise_std(noise: tuple[Noise, ...], training: LocalTraining, clients: int) -> float:
    """Returns the standard deviation of all `noise` in an entry of `clients` clients' mean update.

    `training` is a client's, as the stack's training defenses changed it. The unit is the update's.
    """
    single = training.algorithm == "fedsgd"
    # Variances add up: steps by their squared factors, and the mean of n clients divides by n.
    steps = 1.0 if single else training.lr**2 * sum(w * w for w in step_weights(training))
    share = {"step": steps / clients, "update": 1 / clients, "sum": 1 / clients**2}
    return math.sqrt(sum(each.variance * share[each.on] for each in noise))


def _update(
    plan: UpdatePlan,
    observation: Observation,
    model: Classifier,
    images: Tensor,
    labels: Tensor,
    stream: rng.Stream,
    *,
    bare: bool,
) -> Tensors:
    """Returns a client's update, as computed if `bare`, and else as its stack makes it."""
    training = observation.training
    stack = Stack() if bare else plan.stack
    # Defenses remember nothing yet, as in a client's first round.
    with stack.memory_of({}):
        update = train(
            model,
            observation.model,
            observation.parameters,
            observation.buffers,
            _batches_of(training, images, labels),
            training,
            stack,
            stream,
        ).update
    if bare:
        return update
    state = stack.init(update, plan.declared)
    return stack.apply(update, state, stream)[0]


_DISTANCES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)
"""Shares of the way from the truth to the guess at which the slope is looked at."""
_LANCZOS_STEPS = 12
_STEP = 1e-6
"""Step of a difference quotient, in units of the way; hardly any unit switches within it."""


@dataclass(frozen=True, kw_only=True)
class _Spectrum:
    """Eigenvalues of J'J that Lanczos finds from one direction of images, and its shares."""

    eigenvalues: Tensor  # (k,) >= 0, ascending, in squared units of the update per pixel's
    weights: Tensor  # (k,) shares of the direction's energy, of sum 1
    square: float  # squared length of the direction


class UpdateMap:
    """Maps normalized images (N, C, H, W) to the clients' mean update U, all in float64.

    Called with images and labels (N,) int64, it returns U as a vector (m,) in the order of `names`.
    """

    def __init__(
        self,
        model: Classifier,
        parameters: Tensors,
        buffers: Tensors,
        training: LocalTraining,
        clients: int,
    ) -> None:
        """Prepares the function.

        Args:
            model: Architecture, whatever its weights; it is set to float64 in place.
            parameters: Weights by name, which clients start from.
            buffers: Batch-norm statistics by name.
            training: Local training of a client, whose dropout is left out.
            clients: Number of clients in the mean.
        """
        self._parameters = {n: t.detach().double() for n, t in parameters.items()}
        state = {n: t.double() if t.is_floating_point() else t for n, t in buffers.items()}
        # Masks of dropout are nobody's to know: their mean is computed.
        self._training = replace(training, dropout=0.0)
        self._loss = loss_function(model.double(), state, self._training)
        self._clients = clients
        self.names = tuple(self._parameters)

    def tensors(self, images: Tensor, labels: Tensor, *, differentiable: bool = False) -> Tensors:
        """Returns the mean update by name of clients with equal shares of `images` (N, C, H, W).

        `labels` are (N,) int64. If `differentiable`, gradients flow back to the images.
        """

        def direction(parameters: Tensors, x: Tensor, y: Tensor) -> Tensors:
            found = gradient(self._loss, parameters, x, y, create_graph=differentiable)
            return found if differentiable else {n: g.detach() for n, g in found.items()}

        updates = [
            local_update(
                direction, self._parameters, _batches_of(self._training, x, y), self._training
            )
            for x, y in zip(images.chunk(self._clients), labels.chunk(self._clients), strict=True)
        ]
        return {n: torch.stack([update[n] for update in updates]).mean(0) for n in self.names}

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Returns the update as one vector (m,)."""
        return flat(self.tensors(images, labels), self.names)

    def pull_back(self, images: Tensor, labels: Tensor, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradient of <mean update, v> by `images`, in their shape, for each v (m,)."""
        at = images.detach().requires_grad_()
        update = flat(self.tensors(at, labels, differentiable=True), self.names)
        return [
            torch.autograd.grad(update, at, vector, retain_graph=k < len(vectors) - 1)[0]
            for k, vector in enumerate(vectors)
        ]


def _batches_of(
    training: LocalTraining, images: Tensor, labels: Tensor
) -> list[tuple[Tensor, Tensor]]:
    steps = training.steps
    if training.batches == "same" or steps == 1:
        return [(images, labels)] * steps
    return list(zip(images.chunk(steps), labels.chunk(steps), strict=True))


def flat(tensors: Tensors, names: Sequence[str]) -> Tensor:
    """Returns the entries of the tensors called `names`, in that order, as one vector (m,)."""
    return torch.cat([tensors[name].flatten() for name in names])


def _lanczos(
    update_map: UpdateMap, images: Tensor, labels: Tensor, start: Tensor, short: float
) -> _Spectrum:
    """Finds a few eigenvalues of J'J; `short` is the length of the way from truth to guess."""
    # Weighted sums of a smooth function over these few are close to those over all eigenvalues
    # (Golub and Meurant, Matrices, Moments and Quadrature, 2010).
    short = _STEP * short
    square = float(start.square().sum())
    if square == 0:
        nothing = torch.zeros(1, dtype=torch.float64)
        return _Spectrum(eigenvalues=nothing, weights=nothing + 1, square=0.0)
    basis, diagonal, beside = [start / math.sqrt(square)], [], []
    for step in range(_LANCZOS_STEPS):
        current = basis[-1]
        # J v by a central difference, J' of it by differentiation: J itself is never formed.
        ahead = update_map(images + short * current, labels)
        behind = update_map(images - short * current, labels)
        pushed = (ahead - behind) / (2 * short)
        (image,) = update_map.pull_back(images, labels, [pushed])
        diagonal.append(float((image * current).sum()))
        for _ in range(2):  # once is not enough in floating point
            for vector in basis:
                image = image - (image * vector).sum() * vector
        size = float(image.norm())
        # Nothing new is left: the space that the direction generates is exhausted.
        if step == _LANCZOS_STEPS - 1 or size <= 1e-10 * max(diagonal):
            break
        beside.append(size)
        basis.append(image / size)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for k, size in enumerate(beside):
        tridiagonal[k, k + 1] = tridiagonal[k + 1, k] = size
    eigenvalues, vectors = torch.linalg.eigh(tridiagonal)
    return _Spectrum(
        eigenvalues=eigenvalues.clamp_min(0),
        # The squared first entries of the eigenvectors are the weights of Gaussian quadrature.
        weights=vectors[0].square(),
        square=square,
    )


_DESCENT_STEPS = 80
"""T: accelerated steps of a matching attack, set on ten deployments of benchmarks/preflight.py."""
_STALL_SHARE = 0.25
"""A descent stalls where the slope explains less than this share of the distance. Set as T."""
MOST_GAIN = 50.0
"""Largest gain, dB: float32 gradients resolve pixels no better."""
MOST_IMAGES = 32
"""Images per update that the estimate uses. For larger updates the result is an upper bound."""
_DRAWS = 4
"""Batches of stand-in images that are averaged over."""
_WORK = 2e7
"""Parameters times images of all draws together, above which there are fewer draws."""
_GRID = 4
"""Values of μ per decade."""
_NO_DESCENT = 1e-12
"""Least μ, in units of the eigenvalue that counts, of what needs no descent."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The expected gain of one plan, and what it is made of."""

    gain: float
    """Gain of attacks that match gradients or read a closed form: dB over the guess, 0 to 50."""
    stall: float
    """t_s, 0 to 1: share of the way from truth to guess at which descents stall."""
    unfinished: float | None
    """Share of the guess's squared error, 0 to 1, that noise and a limited number of steps leave;
    None where descents stall at the guess."""
    ceiling: float | None
    """Gain, dB, that noise leaves an attack without a descent; None unless it is all that is added.
    """
    closed_form: bool
    """Whether an attack reads the images off without a search."""
    images: int
    """Number of images, up to `MOST_IMAGES`, in the largest update that was computed."""
    draws: int
    """Number of batches of stand-in images that were averaged over."""


def estimate(plan: UpdatePlan) -> Estimate:
    """Returns the expected gain of the best matching attack on `plan`, whose weights are finite."""
    steps = plan.training.steps if plan.training.batches == "different" else 1
    clients = max(1, min(plan.first.num_clients, MOST_IMAGES // steps))
    # Powers of two; no batch gains more than a smaller one, nor a sum more than one client.
    largest = 2 ** int(math.log2(max(1, MOST_IMAGES // (steps * clients))))
    exponent = math.log2(min(plan.training.batch_size, largest))
    sizes = [2**k for k in range(math.ceil(exponent) + 1)]
    found: list[Estimate] = []
    for size in sizes:
        tried = [_at(plan.of_batches(size, count), sizes[-1]) for count in sorted({1, clients})]
        found.append(min([*tried, *found[-1:]], key=lambda each: each.gain))
        # A larger batch gains no more than this one.
        if found[-1].gain == 0:
            return found[-1]
    last = found[-1]
    if exponent == int(exponent):
        return last
    before = found[-2]
    share = exponent - int(exponent)
    gain = before.gain + share * (last.gain - before.gain)
    return replace(last, gain=gain, ceiling=before.ceiling)


def _mean_gain(errors: Sequence[float]) -> float:
    """Returns the mean of -10 log10(error) dB, each kept from 0 to `MOST_GAIN`."""
    gains = [-10 * math.log10(min(1.0, max(error, 1e-12))) for error in errors]
    return sum(min(MOST_GAIN, max(0.0, gain)) for gain in gains) / len(errors)


@dataclass(frozen=True)
class _Case:
    """One draw of stand-in images, and the way from them to the guess."""

    update_map: UpdateMap
    images: Tensor
    labels: Tensor
    way: Tensor
    disturbance: Disturbance


def _at(plan: UpdatePlan, largest: int) -> Estimate:
    """Returns the estimate at exactly this batch size; `largest` is the largest of the plan."""
    closed = _reads_in_closed_form(plan)
    power = 1 if plan.first.effect.scaled or plan.first.effect.scaled_examples else 2
    # μ >= λ_2 / T², or λ_2 / T where clipping hides the length, as the module says.
    floor = _NO_DESCENT if closed else _DESCENT_STEPS**-power
    count = plan.first.num_images
    size = sum(value.numel() for value in plan.first.parameters.values())
    draws = max(1, min(_DRAWS, int(_WORK / (size * count))))
    cases = [
        _case(plan, plan.observations[k % len(plan.observations)], k, largest)
        for k in range(max(draws, len(plan.observations)))
    ]
    stall = 0.0 if closed or _rows_are_the_image(plan) else _stall(cases)
    noisy = all(case.disturbance.error is None and case.disturbance.std > 0 for case in cases)
    stuck = stall >= 1
    # Where descents stall at once, the remainder still tells the ceiling behind noise.
    left = [] if stuck and not noisy else [_measure_remainder(case, floor) for case in cases]
    return Estimate(
        gain=0.0 if stuck else _mean_gain([descent + stall**2 for descent, _ in left]),
        stall=stall,
        unfinished=None if stuck else 10 ** (-_mean_gain([descent for descent, _ in left]) / 10),
        ceiling=_mean_gain([noise for _, noise in left]) if noisy else None,
        closed_form=closed,
        images=count,
        draws=len(cases),
    )


def _case(plan: UpdatePlan, observation: Observation, draw: int, largest: int) -> _Case:
    images, labels, way = plan.draw_batch(draw, largest)
    model = rebuild(observation)
    disturbed = disturbance(plan, observation, model, images, labels)
    update_map = UpdateMap(
        model,
        observation.parameters,
        observation.buffers,
        observation.training,
        observation.num_clients,
    )
    return _Case(update_map, images, labels, way, disturbed)


def _slope_share(case: _Case, distance: float) -> float:
    """Returns the share of the squared distance to the truth that the slope explains."""
    # U is the update map, p = images + distance * way, r = U(p) - U(images), and J the derivative
    # of U at p. The share is <J'(r - error), distance * way> / |r|²; 0 if r is 0. It is 1 where U
    # is linear and the update exact.
    at = case.images + distance * case.way
    residual = case.update_map(at, case.labels) - case.update_map(case.images, case.labels)
    square = float(residual.square().sum())
    if square == 0:
        return 0.0
    # An attacker follows the update as it is seen, with its error in it.
    error = case.disturbance.error
    aim = residual if error is None else residual - error
    (slope,) = case.update_map.pull_back(at, case.labels, [aim])
    return float((slope * case.way).sum()) * distance / square


def _stall(cases: Sequence[_Case]) -> float:
    """Returns t_s: where the mean share that the slope explains falls below `_STALL_SHARE`."""
    before = 1.0, math.inf
    for distance in _DISTANCES:
        shares = [_slope_share(case, distance) for case in cases]
        share = sum(shares) / len(shares)
        if share < _STALL_SHARE:
            # It stalls at the guess itself.
            if math.isinf(before[1]):
                return 1.0
            # The crossing between two distances: linear in the share, geometric in the distance.
            part = (before[1] - _STALL_SHARE) / (before[1] - share)
            return float(before[0] * (distance / before[0]) ** part)
        before = distance, share
    return 0.0


def _measure_remainder(case: _Case, floor: float) -> tuple[float, float]:
    """Returns shares of the squared error, 0 to 1: left by the whole descent, and by noise alone.

    The descent regularizes with μ of at least `floor` times the eigenvalue that counts.
    """
    length = float(case.way.norm())
    if length == 0:
        return 1.0, 1.0
    own = _lanczos(case.update_map, case.images, case.labels, case.way, length)
    displaced = _displacement_spectrum(case, length)
    # The largest is an outlier that costs one step: the second sets the pace, if there is one.
    top = own.eigenvalues.sort(descending=True).values[:2]
    if float(top[0]) == 0:
        return 1.0, 1.0
    counts = float(top[-1]) or float(top[0])

    def best_above(floor: float) -> float:
        # A descent of so many steps cannot regularize less than this.
        least = counts * floor
        # Up to 10^6 times the largest eigenvalue, where nothing of the images is left.
        decades = math.log10(float(top[0]) / least) + 6
        tried = (least * 10 ** (k / _GRID) for k in range(math.ceil(decades * _GRID)))
        return min([1.0, *(_error(own, displaced, mu, length) for mu in tried)])

    return best_above(floor), best_above(_NO_DESCENT)


def _error(own: _Spectrum, displaced: _Spectrum | None, mu: float, length: float) -> float:
    error = float((own.weights * (mu / (own.eigenvalues + mu)) ** 2).sum())
    if displaced is not None:
        filtered = float((displaced.weights / (displaced.eigenvalues + mu) ** 2).sum())
        error += displaced.square * filtered / length**2
    return error


def _displacement_spectrum(case: _Case, length: float) -> _Spectrum | None:
    """Returns the spectrum of J'J as J'e sees it; None for an exact update."""
    error = case.disturbance.error
    if error is None:
        if case.disturbance.std == 0:
            return None
        entries = len(case.update_map(case.images, case.labels))
        # One seed for all: estimates for different noise then differ by its size alone.
        drawn = torch.randn(entries, generator=rng.generator(0, "noise"), dtype=torch.float64)
        error = case.disturbance.std * drawn
    (start,) = case.update_map.pull_back(case.images, case.labels, [error])
    return _lanczos(case.update_map, case.images, case.labels, start, length)
