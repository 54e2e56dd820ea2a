"""Tries to refute the bounds of `fedsim.privacy.recovery`: exit status 1 if an attempt succeeds.

Each attempt is an attack, or an estimator, at least as strong as any that a server has: it knows
the mechanism, all other data and the prior. A limit is refuted if it does better than the limit by
more than four standard errors; the paper's upper bound, if its estimator's mean error lies above.
Three bounds that fedsim does not state, for they are false of attacks, are shown to fail.

    python benchmarks/bounds.py
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr

from fedsim.contracts.metric import bound_chances
from fedsim.privacy.numerics import gaussian
from fedsim.privacy.recovery import (
    EpsilonDelta,
    chance_within,
    direction_chances,
    gaussian_information,
    gaussian_success_limit,
    least_direction_error,
    least_normal_error,
    mean_limit,
    success_limit,
    tensor_bound,
    tensor_rate,
    van_trees,
)

Array = NDArray[Any]
STREAM = np.random.default_rng(48)
DRAWS = 20_000


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What an attack reached, and what it must not pass."""

    name: str
    reached: float
    error: float
    """Standard error of what was reached."""
    bound: float
    larger: bool
    """Whether a larger value refutes the bound, and not a smaller one."""
    expected: bool = True
    """Whether the bound is one that fedsim states."""

    @property
    def refuted(self) -> bool:
        """Whether it lies beyond the bound for certain."""
        beyond = self.reached - self.bound if self.larger else self.bound - self.reached
        return beyond > 4 * self.error + 1e-9


def share(name: str, hits: Array, bound: float, expected: bool = True) -> Attempt:
    """Returns an attempt whose chance of success is compared."""
    mean = float(hits.mean())
    error = math.sqrt(max(mean * (1 - mean), 1e-12) / len(hits))
    return Attempt(
        name=name, reached=mean, error=error, bound=bound, larger=True, expected=expected
    )


def mean(name: str, values: Array, bound: float, larger: bool, expected: bool = True) -> Attempt:
    """Returns an attempt whose mean is compared."""
    error = float(values.std() / math.sqrt(len(values)))
    return Attempt(
        name=name, reached=float(values.mean()), error=error, bound=bound, larger=larger,
        expected=expected,
    )  # fmt: skip


def claims(distance: float) -> list[EpsilonDelta]:
    """Returns (ε, δ) of a Gaussian release at the δ that a run asks for."""
    deltas = (1e-6, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
    return [(float(gaussian.epsilon(1 / distance, delta)), delta) for delta in deltas]


def most_likely(points: Array, std: float, draws: int = DRAWS) -> tuple[Array, Array, Array]:
    """Draws a point and a noisy release of it; returns (truth, most likely point, release)."""
    truth = STREAM.integers(len(points), size=draws)
    seen = points[truth] + std * STREAM.standard_normal((draws, points.shape[1]))
    likeliest = (seen @ points.T - (points**2).sum(1) / 2).argmax(1)
    return truth, likeliest, seen


def estimators() -> Iterator[Attempt]:
    """Squared errors of estimators behind Gaussian noise, against van Trees and information."""
    d, std, scale = 6, 0.7, STREAM.uniform(0.3, 2, 6)
    jacobian = STREAM.standard_normal((9, d))
    fisher, prior = jacobian.T @ jacobian / std**2, np.diag(1 / scale**2)
    x = scale * STREAM.standard_normal((DRAWS, d))
    seen = x @ jacobian.T + std * STREAM.standard_normal((DRAWS, 9))
    gain = np.linalg.solve(fisher + prior, jacobian.T / std**2)
    least = van_trees(fisher, prior)
    yield mean(
        "posterior mean, linear release (meets it)", ((seen @ gain.T - x) ** 2).sum(1), least, False
    )
    for factor in (0.5, 0.9, 1.1):
        error = ((factor * seen @ gain.T - x) ** 2).sum(1)
        yield mean(f"biased: {factor} x posterior mean", error, least, False)
    unbiased = np.linalg.pinv(jacobian)
    yield mean("least squares, unbiased", ((seen @ unbiased.T - x) ** 2).sum(1), least, False)
    # One entry, released through tanh: the posterior mean over a grid is the best estimator.
    grid = np.linspace(-6, 6, 1201)
    weight = np.exp(-(grid**2) / 2)
    truth = STREAM.standard_normal(4000)
    released = np.tanh(2 * truth) + 0.3 * STREAM.standard_normal(4000)
    likelihood = weight * np.exp(-((released[:, None] - np.tanh(2 * grid)) ** 2) / (2 * 0.09))
    best = likelihood @ grid / likelihood.sum(1)
    slope = (2 / np.cosh(2 * grid) ** 2) ** 2
    information = float((slope * weight).sum() / weight.sum()) / 0.09
    bound = van_trees(np.array([[information]]), np.eye(1))
    yield mean("posterior mean of a tanh release", (best - truth) ** 2, bound, False)
    # A clipped release: what it tells is bounded by its energy, whatever its derivative.
    # The mean over 20,000 draws of the prior, weighed by how likely they make the release, is close
    # to the posterior mean, which is the best of all.
    prior_draws = scale * STREAM.standard_normal((20_000, d))
    for norm in (0.5, 3.0):
        truth = scale * STREAM.standard_normal((2000, d))
        noisy = clip(truth, norm) + STREAM.standard_normal(truth.shape)
        means = clip(prior_draws, norm)
        chance = np.exp(noisy @ means.T - (means**2).sum(1) / 2)
        answer = chance @ prior_draws / chance.sum(1, keepdims=True)
        least = least_normal_error(list(scale**2), gaussian_information(norm**2, 1.0))
        error = ((answer - truth) ** 2).sum(1)
        yield mean(f"posterior mean, clipped to {norm:g}", error, least, False)
    # Of an estimator that may be biased Cramér and Rao's bound is none.
    loud = x @ jacobian.T + 5 * STREAM.standard_normal((DRAWS, 9))
    shrunk = 0.2 * loud @ unbiased.T
    bound = 25 * float(np.trace(np.linalg.inv(jacobian.T @ jacobian)))
    name = "shrunk, against Cramér-Rao without a prior"
    yield mean(name, ((shrunk - x) ** 2).sum(1), bound, False, expected=False)


def clip(points: Array, norm: float) -> Array:
    """Returns points of at most this length."""
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    return points * np.minimum(1, norm / lengths)


def identification() -> Iterator[Attempt]:
    """Chances to name one of the candidates."""
    for count, distance in ((2, 1.0), (10, 0.5), (100, 2.0), (1000, 4.0)):
        points = STREAM.standard_normal((count, min(count, 64)))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        truth, likeliest, _ = most_likely(points, 1 / distance)
        name = f"most likely of {count}, μ = {distance:g}"
        yield share(name, likeliest == truth, gaussian_success_limit(1 / count, distance))
        yield share(
            f"{name}, by (ε, δ)", likeliest == truth, success_limit(1 / count, claims(distance))
        )
    # The hardest candidate alone lies apart: the prior is one of two, one of them at the centre.
    points = np.array([[0.0], [1.0]])
    truth, likeliest, _ = most_likely(points, 0.5)
    yield share("present or absent, μ = 2", likeliest == truth, gaussian_success_limit(0.5, 2.0))
    epsilon, count = 2.0, 50
    kept = STREAM.random(DRAWS) < math.exp(epsilon) / (math.exp(epsilon) + count - 1)
    yield share("randomized response, ε = 2", kept, success_limit(1 / count, [(epsilon, 0.0)]))
    truth = STREAM.integers(20, size=DRAWS) / 19
    noisy = truth + STREAM.laplace(scale=1 / epsilon, size=DRAWS)
    named = np.round(np.clip(noisy, 0, 1) * 19) / 19
    yield share(
        "Laplace noise, ε = 2", np.isclose(named, truth), success_limit(1 / 20, [(epsilon, 0.0)])
    )
    leaks, guess = STREAM.random(DRAWS) < 0.05, STREAM.random(DRAWS) < 0.01
    yield share("all is told with chance δ", leaks | guess, success_limit(0.01, [(0.0, 0.05)]))
    # T steps, of which the attacker adds up all, and an example that is drawn with chance q.
    steps, multiplier = 16, 4.0
    points = np.eye(30)
    truth, likeliest, _ = most_likely(points, multiplier / math.sqrt(steps))
    yield share(
        "16 steps added up",
        likeliest == truth,
        gaussian_success_limit(1 / 30, math.sqrt(steps) / multiplier),
    )
    drawn = gaussian_success_limit(1 / 30, 0.1 * math.sqrt(steps) / multiplier)
    yield share("of who was drawn, against an amplified μ", likeliest == truth, drawn, False)
    # Several answers of which the best counts.
    points = STREAM.standard_normal((200, 32))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    truth, _, seen = most_likely(points, 0.5)
    ranked = np.argsort(-(seen @ points.T), axis=1)[:, :8]
    limit = gaussian_success_limit(8 / 200, 2.0)
    yield share("best of 8 answers", (ranked == truth[:, None]).any(1), limit)
    # A batch of 8 orthogonal gradients: the limit is of a given image, and not of any of them.
    scores = STREAM.standard_normal((4000, 200))
    scores[:, :8] += 2.0
    ranked = np.argsort(-scores, axis=1)[:, :8]
    yield share("a given image of 8, 8 answers", (ranked == 0).any(1), limit)
    yield share("any image of 8, one answer", ranked[:, 0] < 8, limit, False)


def directions() -> Iterator[Attempt]:
    """Directions of features, uniform on the sphere."""
    for dimension, distance in ((3, 2.0), (64, 4.0), (512, 10.0)):
        truth = STREAM.standard_normal((4000, dimension))
        truth /= np.linalg.norm(truth, axis=1, keepdims=True)
        seen = truth + STREAM.standard_normal(truth.shape) / distance
        cosine = (seen * truth).sum(1) / np.linalg.norm(seen, axis=1)
        sine = np.sqrt(np.clip(1 - cosine**2, 0, 1))
        least = least_direction_error(dimension, lambda c, m=distance: gaussian_success_limit(c, m))
        yield mean(f"most likely direction, d = {dimension}, μ = {distance:g}", sine, least, False)
        close = gaussian_success_limit(direction_chances([0.5], dimension)[0], distance)
        yield share(f"within sine 0.5, d = {dimension}", sine <= 0.5, close)
        limit = chance_within(0.5, gaussian_information(1.0, 1 / distance), dimension)
        yield share(f"the same by Fano, d = {dimension}", sine <= 0.5, limit)
    # Answers that are drawn at random bring the span closer, of which the bound is.
    truth = np.eye(16)[0]
    answers = STREAM.standard_normal((2000, 16, 8))
    answers[:, :, 0] += 2.0 * truth
    inside = (np.linalg.qr(answers)[0][:, 0, :] ** 2).sum(1)
    least = least_direction_error(16, lambda c: gaussian_success_limit(c, 2.0), answers=8)
    yield mean("span of 8 answers, d = 16, μ = 2", np.sqrt(1 - inside), least, False)


def pictures() -> Iterator[Attempt]:
    """PSNR of posterior means and most likely pictures, of public images as the prior."""
    steps = STREAM.standard_normal((300, 8, 8)).cumsum(1).cumsum(2)
    images = ndtr(steps / steps.std()).reshape(300, 64)
    distances = torch.cdist(torch.from_numpy(images), torch.from_numpy(images)) / 8
    levels = [step / 2 for step in range(121)]
    chances = bound_chances(distances, [10 ** (-level / 20) for level in levels])
    centred = images - images.mean(0)
    released = centred / np.linalg.norm(centred, axis=1).max()
    for distance in (0.01, 1.0, 3.0, 8.0, 100.0):
        truth, likeliest, seen = most_likely(released, 1 / distance, 4000)
        log = distance**2 * (seen @ released.T - (released**2).sum(1) / 2)
        weight = np.exp(log - log.max(1, keepdims=True))
        posterior = weight @ images / weight.sum(1, keepdims=True)
        limit = mean_limit(levels, chances, lambda c, m=distance: success_limit(c, claims(m)))
        for name, answer in (("posterior mean", posterior), ("most likely", images[likeliest])):
            error = np.maximum(((answer - images[truth]) ** 2).mean(1), 1e-6)
            yield mean(
                f"PSNR of the {name} picture, μ = {distance:g}", -10 * np.log10(error), limit, True
            )


def tensors() -> Iterator[Attempt]:
    """The plain estimator of one feature against Theorem B.1, where its conditions hold."""
    for width, dimension in ((2048, 16), (8192, 64), (16384, 128)):
        size: dict[str, Any] = {"width": width, "dimension": dimension, "images": 1, "classes": 2}
        found = tensor_bound(tensor_rate(**size), **size)
        assert found.is_valid and found.value is not None, found.reason
        errors = []
        for _ in range(6):
            w = STREAM.standard_normal((width, dimension))
            g = np.maximum(w[:, 0], 0)
            moment = (w.T * g) @ w / width - g.mean() * np.eye(dimension)
            values, vectors = np.linalg.eigh(moment)
            cosine = abs(vectors[0, np.abs(values).argmax()])
            errors.append(math.sqrt(max(0.0, 2 - 2 * cosine)))
        yield mean(
            f"H2 estimator, m = {width}, d = {dimension}", np.array(errors), found.value, True
        )


def main() -> int:
    broken = 0
    print(f"{'attempt':55s} {'reached':>9s} {'+-':>8s} {'bound':>9s}")
    for family in (estimators, identification, directions, pictures, tensors):
        for each in family():
            outcome = "REFUTED" if each.refuted else "stands"
            outcome = outcome if each.expected else f"false, as shown: {outcome}"
            broken += each.refuted == each.expected
            figures = f"{each.reached:9.4f} {each.error:8.4f} {each.bound:9.4f}"
            print(f"{each.name:55s} {figures}  {outcome}")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
