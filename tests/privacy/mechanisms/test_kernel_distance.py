"""The distance of neighbours' kernel matrices: never exceeded, attained, and free of n."""

from __future__ import annotations

from typing import Any

import ntk_paper as paper
import pytest
import torch
from torch import Tensor

from fedsim.learners import ntk
from fedsim.privacy.mechanisms import kernel_distance
from fedsim.testing.cases import stream


def rows(n: int, d: int, seed: int, length: float) -> Tensor:
    drawn = torch.randn(n, d, generator=stream(seed), dtype=torch.float64)
    return length * drawn / drawn.norm(dim=1, keepdim=True)


def neighbour(x: Tensor, beta: float, seed: int, bound: float) -> Tensor:
    """The last row moved by at most `beta`, no longer than `bound`; for seed 0 along itself."""
    step = torch.randn(x.shape[1], generator=stream(seed), dtype=torch.float64)
    step = -x[-1] if seed == 0 else step
    other = x.clone()
    other[-1] += beta * step / step.norm()
    other[-1] *= min(1.0, bound / float(other[-1].norm()))
    return other


def changes(kernel: Tensor, other: Tensor) -> Tensor:
    """Eigenvalues of K^½ K'⁻¹ K^½ - I, ascending."""
    root = torch.linalg.cholesky(other)
    half = torch.linalg.solve_triangular(root, kernel, upper=False)
    whole = torch.linalg.solve_triangular(root, half.T, upper=False)
    return torch.linalg.eigvalsh((whole + whole.T) / 2) - 1


def within(found: Tensor, bounds: Any) -> bool:
    """Whether both ends are within those of one of the (λ+, λ-)."""
    up, down = float(found[-1]), -float(found[0])
    return bool(((up <= bounds[:, 0] * (1 + 1e-6)) & (down <= bounds[:, 1] * (1 + 1e-6))).any())


@pytest.mark.parametrize("neurons", [None, 4, 30])
@pytest.mark.parametrize(("length", "beta"), [(1.0, 1e-3), (0.3, 0.05), (2.0, 0.4)])
def test_no_neighbour_is_farther(neurons: int | None, length: float, beta: float) -> None:
    """Random rows and directions, with γ I and without, both ways round."""
    weights = None if neurons is None else ntk.draw_weights(neurons, 7, 1.0, stream(4))
    gain = 1.0
    if weights is not None:
        gain = float(torch.linalg.eigvalsh(weights.T @ weights / len(weights))[-1])
    sizes = {"gain": gain, "row_norm": length}
    for seed in range(5):
        n = 3 + seed
        x = rows(n, 7, seed, length)
        y = neighbour(x, beta, seed, length)
        a, b = ntk.kernel(x, x, weights), ntk.kernel(y, y, weights)
        for lift in (1e-2, 1.0):
            added = lift * torch.eye(n, dtype=torch.float64)
            bound = kernel_distance.lift_distance(beta, lift, **sizes)
            for one, two in ((a, b), (b, a)):
                assert paper.neighbour_distance(one + added, two + added) <= bound
                found = changes(one + added, two + added)
                assert within(found, kernel_distance.eigenvalues_under_lift(beta, lift, **sizes))
                assert float(found[1:-1].abs().max()) < 1e-9
        least = [float(torch.linalg.eigvalsh(gram)[0]) for gram in (a, b)]
        if min(least) > 1e-6:
            found = paper.neighbour_distance(a, b)
            assert found <= paper.assumed(beta, least[1], **sizes) * (1 + 1e-6)
            assert found <= paper.of_data(beta, least[0], **sizes) * (1 + 1e-6)
            bounds = kernel_distance.eigenvalues_above_floor(beta, least[1], **sizes)
            assert within(changes(a, b), bounds)
            bounds = paper.of_data_eigenvalues(beta, least[0], **sizes)
            assert within(changes(a, b), bounds)
            assert within(changes(b, a), bounds)


def test_the_assumed_bound_is_attained() -> None:
    """By rows at right angles, of which one gets shorter: K = I, and one entry (1 - β)⁴ in K'."""
    beta = 1e-5
    x = torch.eye(5, dtype=torch.float64)
    y = x.clone()
    y[-1] *= 1 - beta
    a, b = ntk.kernel(x, x), ntk.kernel(y, y)
    found = paper.neighbour_distance(a, b)
    assert found == pytest.approx((1 - beta) ** -4 - 1)
    assert found == pytest.approx(paper.assumed(beta, (1 - beta) ** 4), rel=1e-4)


@pytest.mark.parametrize("a", [0.01, 0.3, 1.7])
def test_both_eigenvalues_under_a_lift_are_attained_together(a: float) -> None:
    """A kernel of features of any kind: another row fixes what moves, and is orders longer."""
    features = torch.tensor([[0.0, 0.0], [0.0, 1e6]], dtype=torch.float64)
    moved = features.clone()
    moved[0, 1] = a
    lift = torch.eye(2, dtype=torch.float64)
    found = changes(moved @ moved.T + lift, features @ features.T + lift)
    ((up, down),) = kernel_distance.eigenvalues_under_lift(a / 2, 1.0, row_norm=1.0).tolist()
    assert float(found[-1]) == pytest.approx(up, rel=1e-3)
    assert -float(found[0]) == pytest.approx(down, rel=1e-3)
    assert (1 + up) * (1 - down) == pytest.approx(1.0)


def test_no_features_of_any_kind_exceed_the_bound_under_a_lift() -> None:
    """Rows of very different lengths, any one of which moves by r."""
    for seed in range(60):
        draw = stream(seed)
        n, p = 2 + seed % 3, 1 + seed % 4
        lengths = 10 ** (4 * torch.rand(n, 1, generator=draw, dtype=torch.float64) - 2)
        features = lengths * torch.randn(n, p, generator=draw, dtype=torch.float64)
        step = torch.randn(p, generator=draw, dtype=torch.float64)
        moved = features.clone()
        moved[0] += 0.5 * step / step.norm()
        lift = torch.eye(n, dtype=torch.float64)
        found = changes(moved @ moved.T + lift, features @ features.T + lift)
        assert within(found, kernel_distance.eigenvalues_under_lift(0.25, 1.0))
