"""The distance of neighbours' kernel matrices: never exceeded, attained, and free of n."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedsim.learners import ntk
from fedsim.privacy import kernel_distance
from fedsim.types import FedsimError


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


@pytest.mark.parametrize("neurons", [None, 4, 30])
@pytest.mark.parametrize(("length", "beta"), [(1.0, 1e-3), (0.3, 0.05), (2.0, 0.4)])
def test_no_neighbour_is_farther(neurons: int | None, length: float, beta: float) -> None:
    """Random rows and directions, with γ I and without, both ways round."""
    weights = None if neurons is None else ntk.draw_weights(neurons, 7, 1.0, stream(4))
    gain = 1.0
    if weights is not None:
        gain = float(torch.linalg.eigvalsh(weights.T @ weights / len(weights))[-1])
    sizes = {"gain": gain, "row_norm": length}
    for seed in range(12):
        n = 3 + seed
        x = rows(n, 7, seed, length)
        y = neighbour(x, beta, seed, length)
        a, b = ntk.kernel(x, x, weights), ntk.kernel(y, y, weights)
        for lift in (1e-2, 1.0):
            added = lift * torch.eye(n, dtype=torch.float64)
            bound = kernel_distance.lifted(beta, lift, **sizes)
            for one, two in ((a, b), (b, a)):
                assert ntk.neighbour_distance(one + added, two + added) <= bound
        least = [float(torch.linalg.eigvalsh(gram)[0]) for gram in (a, b)]
        if min(least) > 1e-6:
            found = ntk.neighbour_distance(a, b)
            assert found <= kernel_distance.assumed(beta, least[1], **sizes) * (1 + 1e-6)
            assert found <= kernel_distance.of_data(beta, least[0], **sizes) * (1 + 1e-6)


def test_the_assumed_bound_is_attained() -> None:
    """By rows at right angles, of which one gets shorter: K = I, and one entry (1 - β)⁴ in K'."""
    beta = 1e-5
    x = torch.eye(5, dtype=torch.float64)
    y = x.clone()
    y[-1] *= 1 - beta
    a, b = ntk.kernel(x, x), ntk.kernel(y, y)
    found = ntk.neighbour_distance(a, b)
    assert found == pytest.approx((1 - beta) ** -4 - 1)
    assert found == pytest.approx(kernel_distance.assumed(beta, (1 - beta) ** 4), rel=1e-4)


def test_laws() -> None:
    """Small β counts in proportion, and γ, s and B by what they do to r / sqrt(γ)."""
    for bound in (kernel_distance.lifted, kernel_distance.assumed):
        small = bound(1e-9, 2.0)
        assert bound(2e-9, 2.0) == pytest.approx(2 * small, rel=1e-6)
        assert bound(1e-9, 8.0) == pytest.approx(small / 2, rel=1e-6)
        assert bound(1e-9, 2.0, gain=9.0) == pytest.approx(3 * small, rel=1e-6)
        assert bound(1e-9, 2.0, row_norm=5.0) == pytest.approx(5 * small, rel=1e-6)
        # No two rows of norm 1 are farther apart than 2.
        assert bound(2.0, 3.0) == bound(50.0, 3.0)
    ratio = kernel_distance.assumed(1e-9, 2.0) / kernel_distance.lifted(1e-9, 2.0)
    assert ratio == pytest.approx(math.sqrt(2), rel=1e-6)
    back = kernel_distance.assumed(1e-3, 0.1)
    assert kernel_distance.of_data(1e-3, 0.1) == pytest.approx(back / (1 - back))
    assert kernel_distance.of_data(1.0, 0.1) == math.inf


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_is_out_of_range_is_refused(value: float) -> None:
    for call in (kernel_distance.lifted, kernel_distance.assumed, kernel_distance.of_data):
        with pytest.raises(FedsimError, match="beta"):
            call(value, 1.0)
        with pytest.raises(FedsimError, match=r"l(ift|east)"):
            call(1.0, value)
