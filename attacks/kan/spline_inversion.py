"""Images out of a KAN's update, exactly, as long as they are no more than its hidden units.

The first layer's hidden units are h_i = d^(-1/2) Σ_jk w_ijk b_k(u_j): b is the B-spline basis (K
functions) and u = tanh of the normalized image (d entries). With ∂L/∂h_i = δ_in for image n,

    √d ∂L/∂w_ijk = Σ_n δ_in b_k(u_nj),                                                       (1)

a matrix (hidden x dK) of rank at most the number of images. What u is does not depend on weights:
clipping by example and local steps change nothing but δ. Σ_k b_k(u) = 1 and Σ_k ξ_k b_k(u) = u tell
what a combination of rows is, with ξ_k the mean of the knots inside the support of b_k (Marsden, An
Identity for Spline Functions with Applications to Variation-Diminishing Spline Approximation, J.
Approx. Theory 3, 1970).

b(u) lies on a curve. All quadratic forms that vanish there vanish on an image's bases at every
entry, and hardly on anything else in the span. In coordinates c of the span that is linear in c c',
so the solutions are a linear space of symmetric matrices; where it is that of the N images' c_n
c_n', two of its members are diagonalized by the same c_n: an eigenvalue problem (De Lathauwer,
Castaing and Cardoso, Fourth-Order Cumulant-Based Blind Identification of Underdetermined Mixtures,
IEEE Trans. Signal Processing 55, 2007, section III; Johnston, Lovitz and Vijayaraghavan, Computing
Linear Sections of Varieties, FOCS 2023). Under noise, that is the start of a variational
approximation of the posterior of the bilinear model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.contracts.attack import AttackFailed, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import Classifier, normalize
from fedsim.models.kan import KAN, basis_size, spline_basis
from fedsim.models.local import mean_gradient_factor
from fedsim.models.victim import rebuild
from fedsim.types import ModelSpec, Observation, Reconstruction
from fedsim.words import number_of
from fedsim_attacks._attack_kinds import IterativeAttack
from fedsim_attacks.closed_form._quadratic_form import pack, unpack

_ROUNDING = 1e-9  # least noise that is assumed, in units of the gradient's root mean square


@dataclass(frozen=True, kw_only=True)
class _SplineGradient:
    """The mean gradient of a KAN's first layer, in the units of equation (1)."""

    tensor: Tensor
    """(m, d, K) float64: Σ_n δ_in b_k(u_nj), for m hidden units and d entries of an image."""
    noise: float  # standard deviation of the noise in each entry of `tensor`, at least rounding
    degree: int
    intervals: int
    model: Classifier

    @staticmethod
    def read(observation: Observation) -> _SplineGradient:
        # Sums over k are the same at all entries j of an image: their differences are noise.
        if observation.model.name != "kan":
            raise AttackFailed(
                "spline bases are read off a Kolmogorov-Arnold network's first layer, and the "
                f"model is {observation.model.name}: use `model: kan`, or another attack"
            )
        config = KAN.model_validate(dict(observation.model.parameters))
        if config.imprint:
            raise AttackFailed(
                "an imprint module changes what the first layer meets: use attack imprint, or "
                "remove model.imprint"
            )
        model = rebuild(observation).double()
        layers = [name for name, part in model.body.named_modules() if isinstance(part, nn.Linear)]
        weight = observation.update[f"body.{layers[0]}.weight"].double()
        if not weight.any():
            raise AttackFailed(
                "nothing is left of the first layer's gradient: remove less of the update"
            )
        functions = basis_size(config.degree, config.intervals)
        entries = weight.shape[1] // functions
        factor = mean_gradient_factor(observation.training) * math.sqrt(entries)
        tensor = factor * weight.view(-1, entries, functions)
        differences = tensor.sum(2) - tensor.sum(2).mean(1, keepdim=True)
        freedom = differences.numel() - len(differences)
        variance = float(differences.square().sum()) / max(1, freedom)
        rounding = _ROUNDING * float(tensor.square().mean().sqrt())
        return _SplineGradient(
            tensor=tensor,
            # A sum of K entries has K times the variance of one.
            noise=max(rounding, math.sqrt(variance / functions)),
            degree=config.degree,
            intervals=config.intervals,
            model=model,
        )

    def share_unexplained(self, bases: Tensor) -> Tensor:
        """Computes the share of the gradient's energy that `bases` (N, d, K) leave unexplained."""
        design, observed = bases.flatten(1).T, self.tensor.flatten(1).T
        residual: Tensor = observed - design @ torch.linalg.lstsq(design, observed).solution
        return residual.square().sum() / observed.square().sum()

    def error_signals(self, images: Tensor) -> Tensor:
        """Computes the signals ∂ℓ/∂h (N, classes, m) of each label for normalized images."""
        body = self.model.body
        assert isinstance(body, nn.Sequential)
        after = 1 + next(i for i, part in enumerate(body) if isinstance(part, nn.Linear))
        with torch.no_grad():
            hidden = body[:after](images.double())
        with torch.enable_grad():
            hidden.requires_grad_()
            log_probabilities = self.model.head(body[after:](hidden)).log_softmax(1)
            slopes = [
                torch.autograd.grad(-log_probabilities[:, k].sum(), hidden, retain_graph=True)[0]
                for k in range(log_probabilities.shape[1])
            ]
        return torch.stack(slopes, 1)


def _abscissae(degree: int, intervals: int) -> Tensor:
    """Computes ξ (intervals + degree,) float64 with u = Σ_k ξ_k b_k(u) for u in [-1, 1]."""
    middle = torch.arange(intervals + degree, dtype=torch.float64) - (degree - 1) / 2
    return 2 * middle / intervals - 1


_SAMPLES = 32  # points of a piece of the curve; the forms' products are determined by 2 degree + 1
_VANISHING = 1e-10  # singular value over the largest, up to which it counts as 0
_PAIRS = 10  # random pairs of members that are diagonalized; the best conditioned counts


def _quadrics(degree: int, intervals: int) -> Tensor:
    """Finds all symmetric Q (q, K, K) with b(u)' Q b(u) = 0 for all u, orthonormal."""
    u = torch.linspace(-1, 1, _SAMPLES * intervals + 1, dtype=torch.float64)
    basis = spline_basis(u, degree, intervals)
    products = pack(basis[:, :, None] * basis[:, None, :])
    _, sizes, directions = torch.linalg.svd(products)
    rank = int((sizes > _VANISHING * sizes[0]).sum())
    # The null vectors of all packed b b' are the forms that vanish on the curve.
    return unpack(directions[rank:], basis.shape[1])


def _unmix(span: Tensor, forms: Tensor, rng: torch.Generator) -> Tensor:
    """Finds the N members of the space `span` (N, d, K) on which `forms` (q, K, K) vanish."""
    count = len(span)
    if count > 1:
        # c' S_a'Q S_b c = 0 at each entry: linear in c c'.
        equations = torch.einsum("ajk,qkl,bjl->qjab", span, forms, span).flatten(0, 1)
        # R has the null space of all q d equations, and is small.
        triangle = torch.linalg.qr(pack(equations), mode="r").R
        _, _, directions = torch.linalg.svd(triangle)
        members = unpack(directions[-count:], count)
        span = torch.einsum("na,ajk->njk", _diagonalizers(members, rng), span)
    # Σ_k b_k(u) = 1 (Marsden) gives the scale and sign that eigenvectors leave open.
    total = span.sum(2).mean(1)
    return span / total[:, None, None]


def _diagonalizers(members: Tensor, rng: torch.Generator) -> Tensor:
    """Finds c (N, N) such that the c_n c_n' span what `members` (N, N, N) span."""
    best, diagonalizers = -1.0, members[0]
    for _ in range(_PAIRS):
        weights = torch.randn(2, len(members), generator=rng, dtype=members.dtype).to(members)
        one, two = torch.einsum("ta,aij->tij", weights, members)
        vectors = torch.linalg.eig(one @ torch.linalg.pinv(two))[1].real.T
        # The share of each c c' that lies in the space: 1 for solutions.
        inside = torch.einsum("aij,ni,nj->na", members, vectors, vectors).norm(dim=1)
        share = float((inside / vectors.square().sum(1)).min())
        if share > best:
            best, diagonalizers = share, vectors
    return diagonalizers


_NODES = 33  # nodes of a pixel's posterior
_REACH = 6.0  # half their range, in standard deviations
_SETTLED = 1e-6  # change of a pixel in the last sweep, below which the ascent has converged
_WIDEST = 1.0  # standard deviation of a pixel that nothing is known of
_FAINTEST = 1e-12  # least prior variance of error signals, over that of the noise


@dataclass(frozen=True, kw_only=True)
class _SplinePixels:
    """Map between d pixels of an image and splines' points u = tanh((pixel - center) / scale)."""

    center: Tensor  # (d,): mean of the public normalization at each entry
    scale: Tensor  # (d,): standard deviation of the public normalization at each entry

    @staticmethod
    def read(spec: ModelSpec, like: Tensor) -> _SplinePixels:
        repeat = math.prod(spec.input_shape[1:])
        center, scale = (
            torch.tensor(values).to(like).repeat_interleave(repeat)
            for values in (spec.mean, spec.std)
        )
        return _SplinePixels(center=center, scale=scale)

    def squash(self, pixels: Tensor) -> Tensor:
        return ((pixels - self.center) / self.scale).tanh()

    def unsquash(self, u: Tensor) -> Tensor:
        return (self.center + self.scale * u.atanh()).clamp(0, 1)

    def deviation(self, of_u: Tensor, at: Tensor) -> Tensor:
        """Converts standard deviations `of_u` (..., d) to those of pixels, near the pixels `at`."""
        slope = (1 - self.squash(at).square()) / self.scale
        return (of_u / slope).clamp(max=_WIDEST)


class _PixelPosterior(AttackState):
    """The posterior of error signals and pixels, taken as independent of each other."""

    def __init__(
        self, gradient: _SplineGradient, spec: ModelSpec, u: Tensor, spread: Tensor
    ) -> None:
        """Starts at points `u` (N, d) of splines, with deviations `spread` (N,) of an image's."""
        super().__init__(loss=torch.full((), torch.inf).to(u))
        count, (hidden, entries, functions) = len(u), gradient.tensor.shape
        self.gradient, self.spec, self.pixels = gradient, spec, _SplinePixels.read(spec, u)
        self.mean = self.pixels.unsquash(u)
        """(N, d): posterior means of pixels in [0, 1]."""
        self.deviation = self.pixels.deviation(spread[:, None].expand_as(u), self.mean)
        """(N, d): posterior standard deviations of pixels."""
        self.basis = u.new_zeros(count, entries, functions)
        """(N, d, K): posterior means of the spline bases b(u)."""
        self.power = torch.zeros_like(u)
        """(N, d): posterior means of |b(u)|²."""
        self.errors = u.new_zeros(count, hidden)
        """(N, m): posterior means of the error signals δ."""
        self.covariance = u.new_zeros(count, count)
        """(N, N): posterior covariance of the error signals of each hidden unit."""
        self.strength = u.new_full((count,), torch.inf)
        """(N,): prior variance of an image's error signals."""
        self.largest_change = self.loss
        """Largest change of a pixel in the last sweep (0-d)."""


@final
class SplineInversion(IterativeAttack[_PixelPosterior]):
    """Reads a batch off the first layer of a Kolmogorov-Arnold network's update, in closed form.

    Without noise the images of a batch are exact, if they are no more than the hidden units, also
    of a clipped update, of several local steps and of several clients' aggregate. Under noise,
    which is measured in the update itself, pixels are posterior means, found by coordinate ascent;
    their prior is that of the public normalization, cut off at valid pixels.
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
    ) -> _PixelPosterior:
        """Separates the images; AttackFailed if that is not possible. See `Attack.init`."""
        gradient = _SplineGradient.read(observation)
        count = observation.num_images
        hidden, entries, functions = gradient.tensor.shape
        if count > hidden:
            raise AttackFailed(
                f"{number_of(count, 'image')} leave {number_of(hidden, 'combination')} of them in "
                f"the gradients of {number_of(hidden, 'hidden unit')}: observe batches of at most "
                "model.hidden images"
            )
        forms = _quadrics(gradient.degree, gradient.intervals).to(gradient.tensor)
        if count > 1 and not len(forms):
            raise AttackFailed(
                "a sum of two bases of one interval and degree 1 is such a basis, too: raise "
                "model.degree or model.intervals, or observe batches of one image"
            )
        # Equation (1): images' bases span the row space; noise leaves the strongest directions.
        _, _, rows = torch.linalg.svd(gradient.tensor.flatten(1), full_matrices=False)
        bases = _unmix(rows[:count].view(count, entries, functions), forms, rng)
        knots = _abscissae(gradient.degree, gradient.intervals).to(bases)
        u = torch.nan_to_num(bases @ knots).clamp(-1, 1)
        # What noise makes of a linear form of a row of the pseudo-inverse times the gradient.
        weights = torch.linalg.pinv(
            gradient.tensor.flatten(1) @ torch.linalg.pinv(bases.flatten(1))
        )
        spread = gradient.noise * weights.norm(dim=1) * knots.norm()
        state = _PixelPosterior(gradient, observation.model, u, spread)
        for image in range(count):
            _update_pixels(state, image, None, 0.0)
        _update_errors(state)
        return state

    def step(self, state: _PixelPosterior) -> _PixelPosterior:
        """Updates each image's pixels, then the error signals: one sweep. See `Attack.step`."""
        gradient = state.gradient
        before = state.mean.clone()
        # E[δ δ'] over all hidden units, of which each has the same covariance.
        second = state.errors @ state.errors.T + len(gradient.tensor) * state.covariance
        for image in range(len(state.mean)):
            others = second[image].clone()
            others[image] = 0
            target = torch.einsum("i,ijk->jk", state.errors[image], gradient.tensor)
            # What other images explain is taken off: coordinate ascent, one image at a time.
            target -= torch.einsum("n,njk->jk", others, state.basis)
            power = second[image, image]
            _update_pixels(state, image, target / power, float(power) / gradient.noise**2)
        _update_errors(state)
        bases = spline_basis(state.pixels.squash(state.mean), gradient.degree, gradient.intervals)
        state.loss = gradient.share_unexplained(bases)
        state.largest_change = (state.mean - before).abs().max()
        state.iteration += 1
        return state

    def terminate(self, state: _PixelPosterior) -> bool:
        """Returns whether `iterations` are over, or all pixels changed by less than 1e-6."""
        return state.iteration >= self.iterations or bool(state.largest_change < _SETTLED)

    def postprocess(self, state: _PixelPosterior) -> Reconstruction:
        """Returns posterior mean images, and labels whose error signals are most like theirs."""
        images = state.mean.view(-1, *state.spec.input_shape)
        signals = state.gradient.error_signals(normalize(images, state.spec))
        alike = F.cosine_similarity(signals, state.errors[:, None], dim=2)
        return Reconstruction(
            images=images.float(),
            labels=alike.argmax(1),
            loss=float(state.loss),
            iterations=state.iteration,
        )


def _update_pixels(
    state: _PixelPosterior, image: int, target: Tensor | None, precision: float
) -> None:
    """Updates the posterior of an image's pixels and bases by `precision` / 2 |b - target|²."""
    # Without a `target` (d, K) the present mean and deviation stand for it.
    gradient, pixels = state.gradient, state.pixels
    mean, deviation = state.mean[image, :, None], state.deviation[image, :, None]
    low, high = (mean - _REACH * deviation).clamp(0, 1), (mean + _REACH * deviation).clamp(0, 1)
    nodes = low + (high - low) * torch.linspace(0, 1, _NODES).to(mean)  # (d, nodes)
    bases = spline_basis(pixels.squash(nodes.T).T, gradient.degree, gradient.intervals)
    # The prior is normal by the public normalization, cut off at valid pixels by the nodes.
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


def _update_errors(state: _PixelPosterior) -> None:
    """Updates δ given the bases, and its prior variance (by maximizing the evidence)."""
    noise = state.gradient.noise**2
    gram = torch.einsum("njk,ljk->nl", state.basis, state.basis)
    # E|b|² exceeds |E b|² by the variance that uncertain pixels give the basis.
    gram.diagonal().copy_(state.power.sum(1))
    inverse = torch.linalg.inv(gram + torch.diag(noise / state.strength))
    state.errors = inverse @ torch.einsum("njk,ijk->ni", state.basis, state.gradient.tensor)
    state.covariance = noise * inverse
    # The evidence is largest where the prior variance is the posterior second moment.
    variance_of_errors = state.errors.square().mean(1) + state.covariance.diagonal()
    state.strength = variance_of_errors.clamp_min(_FAINTEST * noise)
