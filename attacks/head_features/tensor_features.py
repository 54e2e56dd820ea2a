"""The tensor-decomposition attack on the two-layer head, as its paper states it.

Liu, Wang, Du and Lei, Data Reconstruction Attacks and Defenses: A Systematic Evaluation, section
2.1 and Appendices A and B, after Wang, Lee and Lei, Reconstructing Training Data from Model
Gradient, Provably, AISTATS 2023. From g(w_j) = Σ_k c_k ∂L/∂a_kj = Σ_i r_i σ(w_j'x_i) the matrix
P̂ = Σ_j g(w_j) H_2(w_j) ≈ Σ_i r_i ν x_i x_i' gives the span V of the features, and the tensor
T̂(V, V, V) = Σ_j g(w_j) H_3(w_j)(V, V, V) gives each of them within it.

Moments Σ_j g_j H_p(w_j) are contracted before they are formed. H_2(w) = w w' - I and H_3(w) = w⊗³ -
w ⊗~ I (their Appendix B); H_4(w) = w⊗⁴ - w w' ⊗~ I + I ⊗~ I, over the 6 and 3 ways to place the
indices. By Stein's lemma E[g(w) H_p(w)] = E[∇^p g(w)] for standard normal w (their Lemma 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import Activation, activation
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.head_features import _joint_fit, head_fit
from fedsim_attacks.head_features._head_gradient import HeadGradient, Objective, find_norms
from fedsim_attacks.head_features.head_fit import OutputFit, OutputSolver
from fedsim_attacks.head_features.spectral_features import span

_CHUNK = 4096  # points whose outer products are formed at once


def second_moment(g: Tensor, w: Tensor) -> Tensor:
    """Computes (1/m) Σ_j g_j (w_j w_j' - I), (d, d), from values `g` (m,) and points `w` (m, d)."""
    moment = w.T @ (g[:, None] * w) / len(w)
    return moment - g.mean() * torch.eye(w.shape[1]).to(w)


def _third_along(g: Tensor, w: Tensor, a: Tensor) -> Tensor:
    """Computes (1/m) Σ_j g_j H_3(w_j)(I, I, a), (d, d), of `g` (m,), `w` (m, d), unit `a` (d,)."""
    along = w @ a
    moment = w.T @ ((g * along)[:, None] * w) / len(w)
    mean = (g[:, None] * w).mean(0)
    # H_3(w)(I, I, a) = (a'w)(w w' - I) - w a' - a w'.
    cross = torch.outer(mean, a)
    return moment - (g * along).mean() * torch.eye(w.shape[1]).to(w) - cross - cross.T


def _third_moment(g: Tensor, y: Tensor) -> Tensor:
    """Computes (1/m) Σ_j g_j H_3(y_j), (r, r, r), from values `g` (m,) and `y` (m, r)."""
    mean = (g[:, None] * y).mean(0)
    eye = torch.eye(y.shape[1]).to(y)
    return _cubes(g, y) - _placings(torch.einsum("i,jk->ijk", mean, eye))


def _fourth_along(g: Tensor, y: Tensor, a: Tensor) -> Tensor:
    """Computes (1/m) Σ_j g_j H_4(y_j)(I, I, I, a), (r, r, r), of `g` (m,), `y` (m, r), unit `a`."""
    along = g * (y @ a)
    mean = (along[:, None] * y).mean(0)
    square = y.T @ (g[:, None] * y) / len(y)
    eye = torch.eye(y.shape[1]).to(y)
    # a meets w in three of the six placings of w w' and I, and I in the others.
    with_w = _placings(torch.einsum("i,jk->ijk", mean, eye))
    with_eye = _placings(torch.einsum("ij,k->ijk", square - g.mean() * eye, a))
    return _cubes(along, y) - with_w - with_eye


def _cubes(g: Tensor, y: Tensor) -> Tensor:
    rank = y.shape[1]
    total = y.new_zeros(rank, rank * rank)
    for part, values in zip(torch.split(y, _CHUNK), torch.split(g, _CHUNK), strict=True):
        squares = torch.einsum("ma,mb->mab", part, part).flatten(1)
        total += (values[:, None] * part).T @ squares
    return total.view(rank, rank, rank) / len(y)


def _placings(term: Tensor) -> Tensor:
    """Sums a term that is symmetric in two indices over the three placings of its indices."""
    return term + term.permute(1, 2, 0) + term.permute(2, 0, 1)


_STARTS = 5  # decompositions from random contractions, of which the best is kept
_ROUNDS = 100  # rounds of alternating least squares from each, at most
_TOLERANCE = 1e-12  # change of the relative error in a round at which the rounds end
_RIDGE = 1e-14  # ridge of the least squares, which equal columns make singular


def _find_components(tensor: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Finds unit u_c, rows (r, r), with T_ijs ≈ Σ_c u_ci u_cj z_cs, and the relative residual."""
    # Slices T[:, :, k] of T (r, r, s) are symmetric. Starts diagonalize two random contractions
    # (Kuleshov, Chaganty and Liang, Tensor Factorization via Matrix Factorization, AISTATS 2015).
    rank = len(tensor)
    norm = torch.linalg.vector_norm(tensor)
    if not norm:
        return torch.eye(rank).to(tensor), norm.new_ones(())
    tensor = tensor.cpu() / norm.cpu()
    best, least = torch.eye(rank).to(tensor), float("inf")
    for _ in range(_STARTS):
        found, residual = _alternate(tensor, _start(tensor, rng))
        if residual < least:
            best, least = found, residual
    return best.to(norm), norm.new_tensor(least)


def _start(tensor: Tensor, rng: torch.Generator) -> Tensor:
    """Computes eigenvectors (r, r) of one random contraction relative to another, in rows."""
    one, two = (
        tensor @ torch.randn(tensor.shape[2], generator=rng, dtype=tensor.dtype) for _ in range(2)
    )
    # T = Σ u_c u_c' ⊗ z_c: contractions are U'ΛU and U'MU, whose quotient has eigenvectors u_c.
    vectors = torch.linalg.eig(one @ torch.linalg.pinv(two))[1].T
    # A conjugate pair x ± iy becomes x + y and x - y: its real parts would be one vector twice.
    return F.normalize(vectors.real + vectors.imag, dim=1)


def _alternate(tensor: Tensor, start: Tensor) -> tuple[Tensor, float]:
    import tensorly
    from tensorly.cp_tensor import CPTensor
    from tensorly.decomposition import parafac

    rank, slices = len(tensor), tensor.shape[2]
    # Given u_c the last factors z_c are linear: least squares start them.
    pairs = torch.einsum("ci,cj->cij", start, start).flatten(1)
    last = torch.linalg.pinv(pairs.T) @ tensor.reshape(rank * rank, slices)
    factors = [start.T.numpy().copy(), start.T.numpy().copy(), last.T.numpy().copy()]
    with tensorly.backend_context("numpy", local_threadsafe=True):
        found, errors = parafac(
            tensor.numpy(),
            rank,
            n_iter_max=_ROUNDS,
            init=CPTensor((np.ones(rank), factors)),
            tol=_TOLERANCE,
            l2_reg=_RIDGE,
            return_errors=True,
        )
    residual = float(errors[-1])
    return F.normalize(torch.from_numpy(found.factors[0]).T, dim=1), residual


_NEGLIGIBLE = 1e-3  # moment of an activation, or share of the largest, up to which one counts as 0
_BUDGET, _COARSE = 1500, 16
"""Iterations of each descent, and directions an image where it begins behind blurred rows."""
_UNEQUAL = 3.0  # largest factor between a first norm and the median: wrong directions imply any
_ROUNDING = 5e-7  # share of the longest singular value below which is rounding


@final
class TensorFeatures(DirectAttack):
    """Decomposes moments of ∂L/∂A with Hermite functions H_p of the planted weights W.

    A are the head's output weights. Directions are recovered, not norms. The defaults are the plain
    estimator that the paper writes down. `variance_reduction`, `whiten` and `rows: all` have the
    same expected moments and less variance; together they reach the level that the paper reports
    (docs/feature-recovery.md).
    """

    follows_tensor_rate: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Liu et al., Data Reconstruction Attacks and Defenses, section 2.1, Appendices A and B"
    )

    variance_reduction: bool = False
    """Whether values g of ∂L/∂A lose their constant and linear part in W, which have zero expected
    moments but most of the variance. The paper does not."""
    whiten: bool = False
    """Whether W (W'W / m)^(-1/2), of sample covariance I, replaces W. The paper keeps W."""
    rows: Literal["combined", "all"] = "combined"
    """Rows that the moments are taken of: one sum g of two rows of ∂L/∂A, as in the paper, in which
    the images of a batch hide one another; or all rows, made orthonormal, where images of different
    labels come apart."""
    iterations: Annotated[int, Field(ge=1)] = 100
    """Iterations of the power method for the span."""
    contraction: Literal["auto", "second", "third"] = "auto"
    """Matrix whose eigenvectors give the span: Σ g H_2 (`second`), or Σ g H_3(I, I, a) with a
    random direction a (`third`). `auto` takes the latter if E[σ''] of the activation is 0."""
    refine: bool = False
    """Whether the answer descends from the decomposition to what the head's gradient shows, norms
    included. The paper does not: its answer is the decomposition."""
    oracle: bool = False
    """Whether the true features tell order and signs, as in the paper (section 2, order recovery):
    an upper bound that needs `knowledge.features: known`. Else signs are those that explain ∂L/∂A
    best, and the order says nothing."""

    def required(self) -> Grant:
        """Returns the true features if `oracle` is set, else `needs`. See `Attack.required`."""
        return Grant.least(features="known") if self.oracle else self.needs

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns features (n, d), n the lesser of N and d, of length 1 unless `refine` is set.

        With `oracle` they are (N, d), and 0 where none was found. The loss is the relative residual
        of the decomposition or, with `refine`, the share of the output weights' gradient that is
        left. An AttackFailed says that there is no gradient of a two-layer head with planted
        neurons.
        """
        head = HeadGradient.read(observation)
        estimates, residual = self._decompose(head, rng)
        if self.refine:
            estimates, residual = _refine_features(head, estimates.float())
        if self.oracle:
            assert knowledge.true_features is not None
            estimates = _order_greedily(estimates, knowledge.true_features.to(estimates))
        return Reconstruction(features=estimates.float(), loss=float(residual), iterations=0)

    def _decompose(self, head: HeadGradient, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Finds unit features (N, d), and the residual of `_find_components`; 0 for one image."""
        if not head.config.planted:
            raise AttackFailed(
                "moments need Gaussian weights: let the server plant neurons (`head: {width: ..., "
                "planted: ...}`)"
            )
        # Stein's lemma is for standard normal weights.
        w = head.hidden[head.planted].double() / head.config.planted_std
        outer = (
            head.grad_output[:, head.planted] if self.rows == "all" else _combine_rows(head)[None]
        )
        outer = outer.double()
        if self.variance_reduction:
            design = torch.cat([torch.ones(len(w), 1).to(w), w], 1)
            # Stein's lemma: constant and linear parts have no higher moments, only variance.
            fit = torch.linalg.lstsq(design.T @ design, design.T @ outer.T).solution
            outer = outer - (design @ fit).T
        if self.rows == "all":
            outer = _independent_rows(outer, head.rank, head.noise)
        back = torch.eye(w.shape[1]).to(w)
        if self.whiten:
            back = _inverse_root(w.T @ w / len(w))
            w = w @ back
        moments = _derivative_moments(head.config.activation)
        # k_2 = E[σ''] is 0 for odd activations: then the third moment, along some a, has the span.
        by_second = abs(moments[2]) > _NEGLIGIBLE
        if self.contraction != "auto":
            by_second = self.contraction == "second"
        a = F.normalize(torch.randn(w.shape[1], generator=rng, dtype=w.dtype), dim=0).to(w)
        matrices = [second_moment(g, w) if by_second else _third_along(g, w, a) for g in outer]
        basis = power_method(matrices, head.rank, self.iterations, rng)
        if head.rank == 1:
            return _choose_signs(F.normalize(basis.T @ back, dim=1), head), torch.zeros(())
        y = w @ basis
        inside = F.normalize(torch.randn(head.rank, generator=rng, dtype=w.dtype), dim=0).to(w)
        # k_3 = E[σ'''] is 0 for ReLU: then the fourth moment along some a stands for the third.
        by_third = abs(moments[3]) > _NEGLIGIBLE
        slices = [_third_moment(g, y) if by_third else _fourth_along(g, y, inside) for g in outer]
        if self.rows == "all":
            # All slices are sums of the same u_i u_i': the rows' matrices tell images of different
            # labels apart, and their third moments those of one label.
            slices += [(basis.T @ matrix @ basis)[:, :, None] for matrix in matrices]
        directions, residual = _find_components(torch.cat(slices, 2), rng)
        return _choose_signs(F.normalize(directions @ basis.T @ back, dim=1), head), residual


def _refine_features(head: HeadGradient, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Descends from unit `directions` (N, d) to features, and returns the share they leave."""
    # It begins within the rows' strongest directions: as many as images if they are exact or stand
    # out of noise, else somewhat more, from which it goes on in all directions.
    objective, joint = Objective(head), _joint_fit.joint_fit_applies(head)
    start = objective(directions)
    factors = _factors(head, directions)
    usual = factors.median()
    features = directions * factors.clamp(usual / _UNEQUAL, usual * _UNEQUAL)[:, None]
    clear = head.exact or joint
    count = min(head.rank if clear else _COARSE * head.rank, head.hidden.shape[1])
    basis = span(head.rows, count)[0].to(features.dtype)
    inside = head.restrict(basis)
    solver = OutputSolver(OutputFit(inside, [features @ basis.T]), _BUDGET)
    while not solver.finished:
        solver.improve()
    features = inside.lift(solver.best[1] if head.exact else solver.scale_features())
    if head.exact:
        features = features * _factors(head, features)[:, None]
    elif joint:
        features = _joint_fit.fit_whole_gradient(head, features)
    else:
        features = head_fit.fit_output(head, features, _BUDGET)
    loss = objective(features).loss
    # A descent that leaves more unexplained than its start has led astray.
    return (features, loss) if bool(loss < start.loss) else (directions, start.loss)


def _factors(head: HeadGradient, features: Tensor) -> Tensor:
    """Finds factors (N,) of features (N, d) of the right directions at which they have norms."""
    # Rows of X over f give S diag(f) of ∂L/∂W = S X, and 1 / f follows from ∂L/∂b = S 1, whatever
    # clipping scales. Behind what blurs them norms follow from the probabilities that they imply.
    if not head.exact:
        return find_norms(head, features, Objective(head)(features).errors)[0]
    shares = head.grad_hidden.double() @ torch.linalg.pinv(features.double())
    inverse: Tensor = torch.linalg.lstsq(shares, head.grad_bias.double()[:, None]).solution[:, 0]
    least = inverse.abs().max() * _NEGLIGIBLE
    return inverse.clamp_min(least).reciprocal().to(features.dtype)


def _independent_rows(outer: Tensor, rank: int, noise: float) -> Tensor:
    """Finds orthogonal rows (q, m) of mean square 1 in the span of `outer` (K, m), q <= `rank`."""
    # Its rows mix the images' activations, whose moments tell the features. Unlike images have
    # nearly orthogonal ones: they are found, turned, and a turn keeps the sum of squared moments.
    # Those that noise of this variance could explain are left out, but one remains.
    span: Tensor
    _, lengths, span = torch.linalg.svd(outer, full_matrices=False)
    # Largest singular value of noise alone (Marchenko and Pastur's edge).
    edge = noise**0.5 * (outer.shape[1] ** 0.5 + outer.shape[0] ** 0.5)
    kept = int((lengths > torch.clamp(lengths[0] * _ROUNDING, min=edge)).sum())
    return span[: max(1, min(rank, kept))] * math.sqrt(outer.shape[1])


def _inverse_root(covariance: Tensor) -> Tensor:
    """Computes C^(-1/2) of a symmetric C (d, d), without eigenvalues below 0.1 % of the largest."""
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(covariance)
    inside = values > values[-1] * _NEGLIGIBLE
    return vectors[:, inside] * values[inside].rsqrt() @ vectors[:, inside].T


def _order_greedily(estimates: Tensor, truth: Tensor) -> Tensor:
    """Gives `estimates` (r, d), r <= N, the order and signs of `truth` (N, d); the rest are 0."""
    # Each goes to the free true feature of largest |cosine| (Liu et al., Appendix D).
    cosines = F.normalize(estimates, dim=1) @ F.normalize(truth, dim=1).T
    ordered = torch.zeros_like(truth)
    free = torch.ones(len(truth), dtype=torch.bool, device=truth.device)
    for direction, cosine in zip(estimates, cosines, strict=True):
        place = int(torch.where(free, cosine.abs(), -1).argmax())
        ordered[place] = torch.copysign(direction.new_ones(()), cosine[place]) * direction
        free[place] = False
    return ordered


def _combine_rows(head: HeadGradient) -> Tensor:
    """Sums rows of ∂L/∂A to g_j = Σ_k c_k ∂L/∂a_kj, (v,), of the v planted neurons."""
    # The c keep p's part of r_i = Σ_k c_k (p_ki - y_ki) nearly constant. With A's rows in two
    # groups, c adds a class of each: p_1 + p_2 is 2 / K for even K and near it for odd K (Appendix
    # B, Remark B.2). With rows all equal, or two or three classes, c is one class (Remark B.3).
    outer = head.grad_output[:, head.planted]
    classes = len(outer)
    if classes <= 3 or head.config.planted_rows == "equal":
        return outer[0]
    # One class of each group: rows of A are b1 for half of the classes and b2 for the others.
    return outer[0] + outer[(classes + 1) // 2]


def _derivative_moments(name: Activation) -> dict[int, float]:
    """Computes {p: E[σ^(p)(z)]} of activation σ for p = 2, 3, 4 and standard normal z."""
    # Quadrature of E[σ(z) He_p(z)]: beyond 12 standard deviations the density is below 1e-31.
    z = torch.linspace(-12, 12, 48001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    value = activation(name)(z)
    polynomials = {2: z**2 - 1, 3: z**3 - 3 * z, 4: z**4 - 6 * z**2 + 3}
    return {p: float(torch.trapezoid(value * h * density, z)) for p, h in polynomials.items()}


def power_method(
    matrices: Sequence[Tensor], rank: int, iterations: int, rng: torch.Generator
) -> Tensor:
    """Computes the leading eigenvectors (d, rank) of Σ P² over symmetric `matrices` P (d, d).

    Args:
        matrices: at least one, float64.
        rank: number of eigenvectors, at most d.
        iterations: rounds of orthogonal iteration, from a random basis.
        rng: stream of that basis, on the CPU.
    """
    # Squared, so that eigenvalues of both signs count (Zhong et al. 2017, Algorithm 3).
    square = torch.stack([matrix @ matrix for matrix in matrices]).sum(0)
    start = torch.randn(len(square), rank, generator=rng, dtype=torch.float64).to(square)
    basis: Tensor = torch.linalg.qr(start)[0]
    for _ in range(iterations):
        # Orthogonalized in each round, or all columns would turn to the strongest eigenvector.
        basis = torch.linalg.qr(square @ basis)[0]
    return basis


def _choose_signs(directions: Tensor, head: HeadGradient) -> Tensor:
    # σ(w'x) and σ(-w'x) differ by their odd part, and all of them together fit ∂L/∂A linearly.
    w, b = head.hidden[head.planted].double(), head.bias[head.planted].double()
    outer = head.grad_output[:, head.planted].double()
    norm = 1 / head.config.planted_std
    signs = directions.new_ones(len(directions))

    def residual(signs: Tensor) -> float:
        hidden = head.activation(norm * (signs[:, None] * directions) @ w.T + b)
        fit = torch.linalg.lstsq(hidden.T, outer.T).solution
        return float(torch.linalg.vector_norm(outer - (hidden.T @ fit).T))

    # Trying all 2^N signs is out of reach; single flips end in a minimum after a few passes.
    best = residual(signs)
    improved = True
    while improved:
        improved = False
        for i in range(len(signs)):
            signs[i] = -signs[i]
            value = residual(signs)
            # Strictly better, or rounding would flip one sign to and fro for ever.
            if value < best * (1 - 1e-12):
                best, improved = value, True
            else:
                signs[i] = -signs[i]
    return signs[:, None] * directions
