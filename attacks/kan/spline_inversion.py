"""Images out of a KAN's update, exactly, as long as they are no more than its hidden units.

The rows of the first layer's gradient span the images' spline bases (`spline_gradient`), a curve in
that span is the images (`spline_unmixing`), and a linear form of each basis is a pixel. Where noise
was added, that is the start of a variational approximation of the posterior of the bilinear model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.models.splines import spline_basis
from fedsim.types import ModelSpec, Observation, Reconstruction
from fedsim.words import number_of
from fedsim_attacks._attack_kinds import IterativeAttack
from fedsim_attacks.kan._spline_gradient import SplineGradient, abscissae
from fedsim_attacks.kan._spline_unmixing import quadrics, unmix

_NODES = 33
"""Of a pixel's posterior."""
_REACH = 6.0
"""Half their range, in standard deviations."""
_SETTLED = 1e-6
"""Change of a pixel in the last sweep, below which the ascent has converged."""
_WIDEST = 1.0
"""Standard deviation of a pixel that nothing is known of: valid pixels are all as likely then."""
_FAINTEST = 1e-12
"""Least variance of error signals, in units of the noise's."""


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Where splines meet the d entries of an image: at u = tanh((pixel - center) / scale)."""

    center: Tensor
    """(d,)."""
    scale: Tensor
    """(d,)."""

    @staticmethod
    def of(spec: ModelSpec, like: Tensor) -> Pixels:
        """Derives center and scale from the public normalization."""
        repeat = math.prod(spec.input_shape[1:])
        center, scale = (
            torch.tensor(values).to(like).repeat_interleave(repeat)
            for values in (spec.mean, spec.std)
        )
        return Pixels(center=center, scale=scale)

    def squashed(self, pixels: Tensor) -> Tensor:
        """Maps pixels (..., d) in [0, 1] to u."""
        return ((pixels - self.center) / self.scale).tanh()

    def unsquashed(self, u: Tensor) -> Tensor:
        """Maps u (..., d) in [-1, 1] to pixels in [0, 1]."""
        return (self.center + self.scale * u.atanh()).clamp(0, 1)

    def deviation(self, of_u: Tensor, at: Tensor) -> Tensor:
        """Converts standard deviations of u (..., d) to those of pixels near `at`."""
        slope = (1 - self.squashed(at).square()) / self.scale
        return (of_u / slope).clamp(max=_WIDEST)


@dataclass(kw_only=True)
class Posterior(AttackState):
    """The posterior of error signals and pixels, taken as independent of each other."""

    gradient: SplineGradient
    spec: ModelSpec
    pixels: Pixels
    mean: Tensor
    """(N, d) of pixels in [0, 1]."""
    deviation: Tensor
    """(N, d) of pixels."""
    basis: Tensor
    """(N, d, K) mean of the spline bases."""
    power: Tensor
    """(N, d) mean of their squared norms."""
    errors: Tensor
    """(N, m) mean of the error signals δ."""
    covariance: Tensor
    """(N, N) of the error signals of each hidden unit."""
    strength: Tensor
    """(N,) variance of an image's error signals under the prior."""
    largest_change: Tensor
    """Largest change of a pixel in the last sweep (0-d)."""


@final
class SplineInversion(IterativeAttack[Posterior]):
    """Reads a batch off the first layer of a KAN's update, in closed form.

    Without noise the images of a batch are exact, if they are no more than the hidden units, and
    labels follow from their error signals; nothing needs to be known. That goes for a clipped
    update (also by example), for several local steps and for several clients' aggregate just as
    well. Noise is measured in the update itself. Under it pixels are posterior means, found by
    coordinate ascent; their prior is the normal distribution of the public normalization, cut off
    at valid pixels, so that where nothing is left of the images they are close to its mean.
    """

    on_processor: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "fedsim: Marsden's identity, quadrics of the spline curve and simultaneous diagonalization "
        "(De Lathauwer et al., 2007; Johnston et al., FOCS 2023); variational Bayes under noise"
    )

    iterations: Annotated[int, Field(ge=1)] = 50
    """Sweeps over images and error signals at most; without noise one or two are enough."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Posterior:
        """Unmixes the images.

        Raises:
            AttackFailed: the model is no KAN, nothing is left of its first layer's gradient, there
                are more images than hidden units, or its bases cannot be told apart.
        """
        gradient = SplineGradient.of(observation)
        count, spec = observation.num_images, observation.model
        hidden, entries, functions = gradient.tensor.shape
        if count > hidden:
            raise AttackFailed(
                f"{number_of(count, 'image')} leave {number_of(hidden, 'combination')} of them in "
                "the "
                f"gradients of {number_of(hidden, 'hidden unit')}: observe batches of at most "
                "model.hidden images"
            )
        forms = quadrics(gradient.degree, gradient.intervals).to(gradient.tensor)
        if count > 1 and not len(forms):
            raise AttackFailed(
                "a sum of two bases of one interval and degree 1 is such a basis, too: raise "
                "model.degree or model.intervals, or observe batches of one image"
            )
        _, _, rows = torch.linalg.svd(gradient.tensor.flatten(1), full_matrices=False)
        bases = unmix(rows[:count].view(count, entries, functions), forms, rng)
        knots = abscissae(gradient.degree, gradient.intervals).to(bases)
        u = torch.nan_to_num(bases @ knots).clamp(-1, 1)
        pixels = Pixels.of(spec, u)
        mean = pixels.unsquashed(u)
        # What noise makes of a linear form of a row of the pseudo-inverse times the gradient.
        weights = torch.linalg.pinv(
            gradient.tensor.flatten(1) @ torch.linalg.pinv(bases.flatten(1))
        )
        spread = gradient.noise * weights.norm(dim=1) * knots.norm()
        state = Posterior(
            loss=torch.full((), torch.inf).to(mean),
            gradient=gradient,
            spec=spec,
            pixels=pixels,
            mean=mean,
            deviation=pixels.deviation(spread[:, None].expand_as(u), mean),
            basis=torch.zeros_like(bases),
            power=torch.zeros_like(mean),
            errors=mean.new_zeros(count, hidden),
            covariance=mean.new_zeros(count, count),
            strength=mean.new_full((count,), torch.inf),
            largest_change=torch.full((), torch.inf).to(mean),
        )
        for image in range(count):
            _update_pixels(state, image, None, 0.0)
        _update_errors(state)
        return state

    def step(self, state: Posterior) -> Posterior:
        """Updates the pixels of one image after the other, and then the error signals."""
        gradient = state.gradient
        before = state.mean.clone()
        second = state.errors @ state.errors.T + gradient.hidden * state.covariance
        for image in range(len(state.mean)):
            others = second[image].clone()
            others[image] = 0
            target = torch.einsum("i,ijk->jk", state.errors[image], gradient.tensor)
            target -= torch.einsum("n,njk->jk", others, state.basis)
            power = second[image, image]
            _update_pixels(state, image, target / power, float(power) / gradient.noise**2)
        _update_errors(state)
        bases = spline_basis(state.pixels.squashed(state.mean), gradient.degree, gradient.intervals)
        state.loss = gradient.unexplained(bases)
        state.largest_change = (state.mean - before).abs().max()
        state.iteration += 1
        return state

    def terminate(self, state: Posterior) -> bool:
        """Says whether `iterations` are over, or pixels no longer change."""
        return state.iteration >= self.iterations or bool(state.largest_change < _SETTLED)

    def postprocess(self, state: Posterior) -> Reconstruction:
        """Returns mean images, and the labels whose error signals are most like theirs.

        The loss is the share of the first layer's gradient that these images leave unexplained.
        """
        images = state.mean.view(-1, *state.spec.input_shape)
        signals = state.gradient.error_signals(normalize(images, state.spec))
        alike = F.cosine_similarity(signals, state.errors[:, None], dim=2)
        return Reconstruction(
            images=images.float(),
            labels=alike.argmax(1),
            loss=float(state.loss),
            iterations=state.iteration,
        )


def _update_pixels(state: Posterior, image: int, target: Tensor | None, precision: float) -> None:
    """Updates pixels of one image and their bases by evidence `precision` / 2 |b - target|² (d, K).

    Without a target, by the prior alone.
    """
    gradient, pixels = state.gradient, state.pixels
    mean, deviation = state.mean[image, :, None], state.deviation[image, :, None]
    low, high = (mean - _REACH * deviation).clamp(0, 1), (mean + _REACH * deviation).clamp(0, 1)
    nodes = low + (high - low) * torch.linspace(0, 1, _NODES).to(mean)  # (d, nodes)
    bases = spline_basis(pixels.squashed(nodes.T).T, gradient.degree, gradient.intervals)
    log = -((nodes - pixels.center[:, None]) / pixels.scale[:, None]).square() / 2
    if target is None:
        log = log - ((nodes - mean) / deviation).square() / 2
    else:
        log = log - precision / 2 * (bases - target[:, None]).square().sum(2)
    weight = log.softmax(1)
    state.mean[image] = (weight * nodes).sum(1)
    variance = (weight * (nodes - state.mean[image, :, None]).square()).sum(1)
    # Nodes can hide a posterior that is narrower than their distance: then they move closer.
    state.deviation[image] = torch.maximum(variance.sqrt(), (high - low)[:, 0] / (2 * _NODES))
    state.basis[image] = torch.einsum("jp,jpk->jk", weight, bases)
    state.power[image] = (weight * bases.square().sum(2)).sum(1)


def _update_errors(state: Posterior) -> None:
    """Updates δ given the bases, and its prior variance (by maximizing the evidence)."""
    noise = state.gradient.noise**2
    gram = torch.einsum("njk,ljk->nl", state.basis, state.basis)
    gram.diagonal().copy_(state.power.sum(1))
    inverse = torch.linalg.inv(gram + torch.diag(noise / state.strength))
    state.errors = inverse @ torch.einsum("njk,ijk->ni", state.basis, state.gradient.tensor)
    state.covariance = noise * inverse
    variance_of_errors = state.errors.square().mean(1) + state.covariance.diagonal()
    state.strength = variance_of_errors.clamp_min(_FAINTEST * noise)
