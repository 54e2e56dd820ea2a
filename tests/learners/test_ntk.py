"""Quadratic NTK regression: kernels, limits, the private release, and the paper's errors."""

from __future__ import annotations

import math

import ntk_paper as paper
import pytest
import torch
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits
from torch import Tensor

from fedsim.learners import ntk
from fedsim.privacy.mechanisms import kernel_distance, wishart
from fedsim.testing.cases import stream
from fedsim_defenses.gaussian_sampling import sampled_covariance, square_root
from fedsim_defenses.truncated_laplace import truncated_laplace


def unit_rows(n: int, d: int, seed: int) -> Tensor:
    rows = torch.randn(n, d, generator=stream(seed), dtype=torch.float64)
    return rows / rows.norm(dim=1, keepdim=True)


def test_the_discrete_kernel_is_the_definitions_sum() -> None:
    x, z = unit_rows(3, 5, 0), 2 * unit_rows(4, 5, 1)
    weights = ntk.draw_weights(7, 5, 1.5, stream(2))
    values = ntk.kernel(x, z, weights)
    for i in range(3):
        for j in range(4):
            terms = [((w @ x[i]) * x[i]) @ ((w @ z[j]) * z[j]) for w in weights]
            assert float(values[i, j]) == pytest.approx(float(sum(terms)) / 7, rel=1e-12)


def test_it_is_the_tangent_kernel_of_the_network() -> None:
    """<∂f(x)/∂W, ∂f(z)/∂W> = 4 K(x, z) for f(x) = m^-½ Σ a_r (w_r'x)², whatever the signs a."""
    x, z = unit_rows(1, 5, 0)[0], unit_rows(1, 5, 1)[0]
    weights = ntk.draw_weights(7, 5, 1.0, stream(2)).requires_grad_()
    signs = torch.tensor([1.0, -1, 1, 1, -1, -1, 1], dtype=torch.float64)

    def slope(at: Tensor) -> Tensor:
        value = (signs * (weights @ at) ** 2).sum() / math.sqrt(7)
        return torch.autograd.grad(value, weights)[0]

    expected = float((slope(x) * slope(z)).sum()) / 4
    value = ntk.kernel(x[None], z[None], weights.detach())
    assert float(value) == pytest.approx(expected, rel=1e-12)


def test_regression_interpolates_without_ridge_and_forgets_the_kernel_with_much() -> None:
    x = unit_rows(10, 20, 0)
    labels = ntk.one_hot(torch.arange(10) % 3, 3)
    gram = ntk.kernel(x, x)
    close = ntk.kernel(x, x) @ ntk.fit(gram, labels, 1e-10)
    torch.testing.assert_close(close, labels, rtol=0, atol=1e-7)
    alpha = ntk.fit(gram, labels, 1e9)
    torch.testing.assert_close(alpha, paper.fit_without_kernel(labels, 1e9), rtol=1e-7, atol=1e-17)
    residual = (gram + 0.3 * torch.eye(10).double()) @ ntk.fit(gram, labels, 0.3) - labels
    assert float(residual.abs().max()) < 1e-12


@pytest.mark.parametrize("count", [1, 5, 12, 40])
def test_woodbury_is_the_plain_solution(count: int) -> None:
    x, labels = unit_rows(12, 4, 0), ntk.one_hot(torch.arange(12) % 3, 3)
    samples = paper.gaussian_samples(square_root(ntk.kernel(x, x)), count, stream(1))
    plain = torch.linalg.solve(samples @ samples.T / count + 0.7 * torch.eye(12).double(), labels)
    torch.testing.assert_close(paper.fit_sampled(samples, labels, 0.7), plain)


def test_samples_have_the_kernels_covariance_even_if_it_is_singular() -> None:
    x = unit_rows(3, 6, 0)[[0, 1, 2, 2]]
    gram = ntk.kernel(x, x)
    root = square_root(gram)
    torch.testing.assert_close(root @ root.T, gram, rtol=0, atol=1e-12)
    samples = paper.gaussian_samples(root, 400_000, stream(1))
    torch.testing.assert_close(samples[2], samples[3], rtol=0, atol=1e-6)
    assert float((samples @ samples.T / 400_000 - gram).abs().max()) < 0.01


def test_noise_on_the_inputs_is_truncated_laplace() -> None:
    """Against its density's own moments, and within its bound."""
    rows = torch.full((200, 300), 5.0, dtype=torch.float64)
    noise = truncated_laplace(rows, 2.0, 3.0, stream(0)) - 5
    assert float(noise.abs().max()) <= 3
    assert abs(float(noise.mean())) < 0.03
    share = 1 - math.exp(-1.5)
    expected = 2.0 - 3.0 * math.exp(-1.5) / share  # E|x|
    assert float(noise.abs().mean()) == pytest.approx(expected, rel=0.01)
    inside = (1 - math.exp(-0.5)) / share
    assert float((noise.abs() <= 1).double().mean()) == pytest.approx(inside, rel=0.01)


def moved(x: Tensor, beta: float, seed: int) -> Tensor:
    """A neighbour: the last row moved by `beta`, no longer than before."""
    step = torch.randn(x.shape[1], generator=stream(seed), dtype=torch.float64)
    if seed == 0:
        step = -x[-1]
    other = x.clone()
    other[-1] += beta * step / step.norm()
    other[-1] *= min(1.0, float(x[-1].norm() / other[-1].norm()))
    return other


def test_the_distance_is_the_definitions() -> None:
    x = unit_rows(6, 9, 0)
    gram, other = ntk.kernel(x, x), ntk.kernel(moved(x, 0.05, 1), moved(x, 0.05, 1))
    root = sqrtm(gram.numpy()).real
    expected = root @ torch.linalg.inv(other).numpy() @ root
    expected = torch.from_numpy(expected) - torch.eye(6).double()
    assert paper.neighbour_distance(gram, other) == pytest.approx(float(expected.norm()), rel=1e-9)
    assert paper.neighbour_distance(gram, gram) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("neurons", [None, 3, 12])
def test_the_predictor_is_a_quadratic_form_and_so_is_the_mean_of_several(
    neurons: int | None,
) -> None:
    """x'Qx is K(x, X) α, and the mean Q predicts the mean of two clients' predictions."""
    weights = None if neurons is None else ntk.draw_weights(neurons, 5, 1.0, stream(3))
    scale = 1.7 if weights is None else 1.0
    x, forms, expected = 3 * unit_rows(4, 5, 9), [], []
    for seed in (0, 1):
        train, alpha = unit_rows(7 + seed, 5, seed), unit_rows(7 + seed, 3, 20 + seed)
        forms.append(ntk.quadratic_form(train, alpha, weights, scale=scale))
        expected.append(ntk.kernel(x, train, weights, scale=scale) @ alpha)
        torch.testing.assert_close(ntk.evaluate_form(x, forms[-1]), expected[-1])
        torch.testing.assert_close(forms[-1], forms[-1].transpose(1, 2))
    mean = ntk.evaluate_form(x, torch.stack(forms).mean(0))
    torch.testing.assert_close(mean, torch.stack(expected).mean(0))


@pytest.mark.parametrize("count", [0, 1, 6, 5000])
def test_a_sampled_covariance_is_the_mean_of_the_draws_squares(count: int) -> None:
    """The same draws as in one piece; none at all is zero."""
    x = unit_rows(6, 4, 0)
    root = square_root(ntk.kernel(x, x))
    covariance = sampled_covariance(root, count, stream(1))
    if count == 0:
        assert not covariance.any()
        return
    assert float(torch.linalg.eigvalsh(covariance)[0]) > -1e-12
    if count <= 4096:
        drawn = paper.gaussian_samples(root, count, stream(1))
        torch.testing.assert_close(covariance, drawn @ drawn.T / count)
    else:
        torch.testing.assert_close(covariance, ntk.kernel(x, x), rtol=0, atol=0.1)


@pytest.mark.parametrize(("count", "n"), [(3, 20), (60, 20), (4000, 20), (400, 60)])
def test_predictions_stray_no_farther_than_the_bound(count: int, n: int) -> None:
    """In 100 draws at a failure of 5%: the bound is far from tight."""
    x, test = unit_rows(n, 6, 0), unit_rows(5, 6, 1)
    labels, ridge = ntk.one_hot(torch.arange(n) % 3, 3), 0.5
    gram, cross = ntk.kernel(x, x), ntk.kernel(test, x)
    exact = cross @ ntk.fit(gram, labels, ridge)
    most = paper.deviation_bound(gram, cross, labels, ridge, count)
    root = square_root(gram)
    for seed in range(100):
        samples = paper.gaussian_samples(root, count, stream(seed))
        found = cross @ paper.fit_sampled(samples, labels, ridge)
        assert bool(((found - exact).abs() <= most).all())
    # With many draws it falls like 1 / sqrt(k).
    many, more = (
        paper.deviation_bound(gram, cross, labels, ridge, k) for k in (10**10, 4 * 10**10)
    )
    torch.testing.assert_close(more, many / 2, rtol=1e-2, atol=0)
    assert bool((many < most).all())


class TestErrorsOfThePaper:
    """What the paper says, and an example of its being otherwise."""

    DELTA, BETA, SMALLEST = 2e-3, 1e-6, 7e-3

    @pytest.mark.parametrize(("images", "least"), [(1_000, 7.1), (10_000, 71.0)])
    def test_its_guarantee_never_applies_in_its_own_experiment(
        self, images: int, least: float
    ) -> None:
        """M <= Δ needs ε >= 8 ln(1/δ) M, and Lemma 5.4 needs ε < 1."""
        distance = paper.distance(images, self.BETA, self.SMALLEST)
        assert 8 * math.log(1 / self.DELTA) * distance == pytest.approx(least, rel=2e-3)
        for epsilon in torch.linspace(0.01, 0.99, 99).tolist():
            for count in (1, 10, 100, 10_000):
                assert not paper.condition(epsilon, self.DELTA, count, distance)
        assert paper.condition(0.9, self.DELTA, 1, 1e-3)

    def test_equation_1_has_the_wrong_power_of_b(self) -> None:
        """Longer rows change the kernel as B³ (so k falls as B⁶), not as B⁴ (B⁸)."""
        x = unit_rows(20, 40, 0)
        change = []
        for length in (1.0, 2.0):
            a, b = length * x, length * x
            b = a.clone()
            b[-1] *= 1 - 1e-7 / length
            change.append(float((ntk.kernel(a, a) - ntk.kernel(b, b)).norm()))
        assert math.log2(change[1] / change[0]) == pytest.approx(3.0, abs=1e-4)
        ratio = paper.distance(20, 1e-7, 1.0, bound=2.0) / paper.distance(20, 1e-7, 1.0)
        assert math.log2(ratio) == 4

    def test_equation_1_counts_a_tenth_of_the_images(self) -> None:
        """Its n is 1,000 where the experiment has 10,000: 100 times too many samples."""
        counts = [
            paper.samples(30.0, self.DELTA, paper.distance(n, self.BETA, self.SMALLEST))
            for n in (1_000, 10_000)
        ]
        assert counts[0] >= 100 * counts[1] > 0

    def test_psi_is_no_bound_of_the_change(self) -> None:
        """Lemma E.4's O(sqrt(n) σ² B³ β), read as 1 in equation (1), hides up to 2 sqrt(2)."""
        x = unit_rows(1, 3, 0).repeat(50, 1)
        other = x.clone()
        other[-1] *= 1 - 1e-6
        change = float((ntk.kernel(x, x) - ntk.kernel(other, other)).norm())
        assert change > 2.8 * math.sqrt(50) * 1e-6

    def test_lemma_e15_grows_with_n_where_the_distance_does_not(self) -> None:
        """From 100 rows to 1,000 the paper's bound is ten times as large; the truth does not grow.

        With γ I added; what is added is what bounds the eigenvalues from below.
        """
        distances = []
        for n in (100, 1000):
            x = unit_rows(n, 8, 3)
            other = moved(x, 1e-3, 1)
            lift = 0.5 * torch.eye(n).double()
            distances.append(
                paper.neighbour_distance(ntk.kernel(x, x) + lift, ntk.kernel(other, other) + lift)
            )
        assert max(distances) <= kernel_distance.lift_distance(1e-3, 0.5)
        assert distances[1] < 1.1 * distances[0]
        printed = [paper.distance(n, 1e-3, 0.5) for n in (100, 1000)]
        assert printed[1] == pytest.approx(10 * printed[0])

    def test_its_own_bound_is_thousands_of_times_too_large(self) -> None:
        """At its own n, β and η_min: 1/7 where 5e-5 is proven; and ε = 10 is 0.003."""
        printed = paper.distance(1_000, self.BETA, self.SMALLEST)
        proven = paper.of_data(self.BETA, self.SMALLEST)
        assert proven < printed / 2000
        count = paper.samples(10.0, self.DELTA, printed)
        assert wishart.epsilon(count, proven, self.DELTA) < 0.01

    @pytest.mark.parametrize(("asked", "low", "high"), [(7.0, 2.4, 2.8), (10.0, 3.6, 4.0)])
    def test_lemma_5_4_says_two_to_three_times_what_its_own_draws_cost(
        self, asked: float, low: float, high: float
    ) -> None:
        """The exact accountant at the paper's own M = 1/7 and number of samples."""
        distance = paper.distance(1_000, self.BETA, self.SMALLEST)
        count = paper.samples(asked, self.DELTA, distance)
        assert low < wishart.epsilon(count, distance, self.DELTA) < high

    def test_its_neurons_are_too_few_for_its_lemma(self) -> None:
        """Condition 5.5 asks for m of the order of n d B² / β², and the experiment has 256.

        Not needed: at any m the kernel is smooth, with the largest eigenvalue of W'W / m for σ².
        """
        wanted = 1_000 * 512 / self.BETA**2
        assert wanted > 1e15 * 256
        weights = ntk.draw_weights(256, 30, 1.0, stream(0))
        gain = float(torch.linalg.eigvalsh(weights.T @ weights / 256)[-1])
        x = unit_rows(40, 30, 1)
        other = moved(x, self.BETA, 2)
        change = ntk.kernel(x, x, weights) - ntk.kernel(other, other, weights)
        assert float(change.norm()) <= 2 * gain * self.BETA * math.sqrt(2 * 40 + 2)

    def test_its_utility_bound_is_void_in_its_own_experiment(self) -> None:
        """Lemma 5.4, part 3, needs ρ < 1, so k > n²: the experiment draws fewer than 10,000."""
        most = paper.samples(100.0, self.DELTA, paper.distance(1_000, 1e-6, 7e-3))
        for n in (1_000, 10_000):
            rho = math.sqrt(n**2 / most) + n**2 / most
            assert rho > 100

    def test_the_fourth_moment_of_fact_a4(self) -> None:
        """It says 3σ² for N(0, σ²); it is 3σ⁴."""
        drawn = 2 * torch.randn(400_000, generator=stream(0), dtype=torch.float64)
        fourth = float((drawn**4).mean())
        assert fourth == pytest.approx(3 * 2**4, rel=0.03)
        assert abs(fourth - 3 * 2**2) > 30

    def test_the_number_of_samples_tells_of_the_data(self) -> None:
        """η_min is the private data's own: two neighbours get different k, which K̃'s rank shows."""
        x = unit_rows(6, 12, 0)
        other = moved(x, 1e-3, 0)
        distances = [
            paper.distance(6, 1e-3, float(torch.linalg.eigvalsh(ntk.kernel(a, a))[0]))
            for a in (x, other)
        ]
        assert distances[0] != distances[1]
        edge = math.sqrt(4 * 8 * math.log(1 / self.DELTA)) * sum(distances) / 2
        counts = {paper.samples(edge, self.DELTA, distance) for distance in distances}
        assert counts == {3, 4}

    def test_labels_are_not_protected(self) -> None:
        """Every α̃ of at most a few samples says most labels as they are; without K, all of them."""
        images, classes = digits(300)
        labels = ntk.one_hot(classes, 10)
        samples = paper.gaussian_samples(square_root(ntk.kernel(images, images)), 20, stream(1))
        alpha = paper.fit_sampled(samples, labels, 10.0)
        assert float((alpha.argmax(1) == classes).double().mean()) > 0.9
        bare = paper.fit_without_kernel(labels, 10.0)
        assert bool((bare.argmax(1) == classes).all())

    def test_neighbours_are_closer_than_any_two_records(self) -> None:
        images, _ = digits(300)
        gaps = torch.cdist(images, images) + 9 * torch.eye(300)
        assert float(gaps.min()) > 1e4 * self.BETA

    def test_the_missing_factor_changes_no_class(self) -> None:
        """Definition 3.8 divides by n, Algorithm 2 does not."""
        images, classes = digits(200)
        alpha = ntk.fit(ntk.kernel(images, images), ntk.one_hot(classes, 10), 10.0)
        values = ntk.kernel(images, images) @ alpha
        assert torch.equal(values.argmax(1), (values / 200).argmax(1))

    def test_the_kernel_behind_few_samples_is_worse_than_none(self) -> None:
        """α = Y / λ needs no K, so it costs none of its budget, and on average it beats ε = 8."""
        images, classes = digits(1400)
        train, test = slice(0, 1000), slice(1000, 1400)
        labels = ntk.one_hot(classes[train], 10)
        root = square_root(ntk.kernel(images[train], images[train]))
        count = paper.samples(8.0, self.DELTA, paper.distance(1_000, 1e-6, 7e-3))

        def accuracy(alpha: Tensor) -> float:
            values = ntk.kernel(images[test], images[train]) @ alpha
            return float((values.argmax(1) == classes[test]).double().mean())

        private = [
            accuracy(
                paper.fit_sampled(paper.gaussian_samples(root, count, stream(s)), labels, 10.0)
            )
            for s in range(5)
        ]
        assert sum(private) / 5 < accuracy(paper.fit_without_kernel(labels, 10.0))


def digits(count: int) -> tuple[Tensor, Tensor]:
    """(count, 64) unit rows and their classes."""
    data = load_digits()
    rows = torch.from_numpy(data.data[:count]).double()
    return rows / rows.norm(dim=1, keepdim=True), torch.from_numpy(data.target[:count]).long()
