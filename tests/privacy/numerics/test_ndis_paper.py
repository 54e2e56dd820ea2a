"""Every error found in the NDIS paper, shown; and the noise levels that it prints, recomputed.

The paper is Lu, Magdon-Ismail, Wei and Zikas, The Normal Distributions Indistinguishability
Spectrum and its Application to Privacy-Preserving Machine Learning. docs/privacy-calculator.md
lists what is shown here.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from ndis_tables import databases

from fedsim.privacy import baselines
from fedsim.privacy.baselines import mutual_information_leverage
from fedsim.privacy.mechanisms import least_squares, projection

CANCER = {"n": 2809, "d": 12, "r": 300, "row_norm": 1.1075}
FLIGHT = {"n": 327346, "d": 2, "r": math.floor(math.log(327346) / 0.1**2), "row_norm": 0.07225}


def test_its_noise_is_not_optimal() -> None:
    """Section 5.2 calls σ = l sqrt(1/s̄) optimal. The database holds the row: less is enough."""
    for r, epsilon, delta in ((20, 1.0, 1e-5), (300, 1.0, 1 / 2809), (1, 5.0, 1e-2)):
        tight = float(projection.sigma(1.0, r, epsilon, delta))
        paper = float(projection.sigma(1.0, r, epsilon, delta, "paper"))
        assert tight < paper
        # No database gives a row of norm 1 a larger leverage under the tight noise ...
        stream = np.random.default_rng(r)
        row = np.array([1.0, 0.0, 0.0])
        for rows in (0, 1, 5):
            data = np.vstack([row, stream.normal(size=(rows, 3))])
            leverage = row @ np.linalg.solve(data.T @ data + tight**2 * np.eye(3), row)
            assert np.exp(projection.log_delta(leverage, r, epsilon)) <= delta * (1 + 1e-9)
        # ... and the database of that row alone attains δ, so that still less is not.
        alone = 1 / (1 + tight**2)
        assert np.exp(projection.log_delta(alone, r, epsilon)) == pytest.approx(delta)
        assert np.exp(projection.log_delta(1 / (1 + (0.99 * tight) ** 2), r, epsilon)) > delta


def test_its_least_squares_mechanism_charges_a_leverage_that_no_row_has() -> None:
    """Figure 4 takes q = 2 l²/σ² (Proposition 4: q is itself a leverage, so at most l²/(l²+σ²))."""
    stream = np.random.default_rng(0)
    norm, sigma, d = 1.0, 3.0, 4
    most = norm**2 / (norm**2 + sigma**2)
    for rows in (1, 3, 30):
        data = stream.normal(size=(rows, d + 1))
        data *= norm / np.linalg.norm(data, axis=1, keepdims=True)
        padded = data.T @ data + sigma**2 * np.eye(d + 1)
        q = np.einsum("ni,ij,nj->n", data, np.linalg.inv(padded), data)
        features = data[:, :d]
        p = np.einsum("ni,ij,nj->n", features, np.linalg.inv(padded[:d, :d]), features)
        assert (p <= q + 1e-12).all()
        assert q.max() <= most + 1e-12 < 2 * norm**2 / sigma**2


@pytest.mark.slow
def test_least_squares_needs_less_noise_than_the_projection() -> None:
    """Table II ranks them the other way round, because of the corner (q, p) = (2, 1) l²/σ²."""
    setup = CANCER
    keys = setup["row_norm"], setup["r"]
    delta = 1 / setup["n"]
    paper = least_squares.sigma(*keys, setup["d"], 1.0, delta, "paper")
    paper_projection = float(projection.sigma(*keys, 1.0, delta, "paper"))
    tight = least_squares.sigma(*keys, setup["d"], 1.0, delta)
    tight_projection = float(projection.sigma(*keys, 1.0, delta))
    assert paper > paper_projection > tight_projection > tight


def test_the_hypothesis_of_theorem_5_is_false_in_p() -> None:
    """δ is not increasing in p at fixed q: q = 0.1, r = 1000, d = 10, ε = 1."""
    curve = np.exp(least_squares.log_delta(np.linspace(0, 0.1, 11), 0.1, 1000, 10, 1.0))
    assert curve.argmax() == 5
    assert curve[10] < 1e-5 < 1e-4 < curve[0] < curve[5]
    assert curve[5] == pytest.approx(0.3874, abs=1e-4)


def test_the_hypothesis_of_theorem_5_is_false_in_the_residual() -> None:
    """Nor is it in q at fixed p: r = 20, d = 2, ε = 3, p = 0.12 falls between 0.075 and 0.1."""
    residual = np.array([0.025, 0.05, 0.075, 0.1, 0.125])
    curve = np.exp(least_squares.log_delta(0.12, 0.12 + residual, 20, 2, 3.0))
    assert (np.diff(curve) > 0).tolist() == [True, True, False, True]


def test_the_sign_in_the_proof_of_proposition_3() -> None:
    """dδ/dp is +x f((1-p) x), f the density of a chi-square with r degrees of freedom."""
    from scipy.stats import chi2

    for p, r, epsilon in ((0.1, 20, 1.0), (0.5, 3, 0.2), (0.02, 500, 0.4)):
        step = 1e-6 * p
        ends = np.exp(projection.log_delta(np.array([p - step, p + step]), r, epsilon))
        x = (2 * epsilon - r * math.log1p(-p)) / p
        slope = np.diff(ends)[0] / (2 * step)
        assert slope == pytest.approx(x * chi2.pdf((1 - p) * x, r), rel=1e-5)


def test_below_its_precision_delta_is_not_0() -> None:
    """Tables III and IV print δ <= 1e-16: differences of 1 - cdf. The values are far smaller."""
    from scipy.stats import chi2

    p, r, epsilon = 0.004, 1269, 1.0
    x = (2 * epsilon - r * math.log1p(-p)) / p
    naive = (1 - chi2.cdf((1 - p) * x, r)) - math.exp(epsilon) * (1 - chi2.cdf(x, r))
    exact = float(projection.log_delta(p, r, epsilon))
    assert naive == 0.0
    assert -100 < exact / math.log(10) < -16


def test_the_row_norm_of_15_is_taken_from_the_data() -> None:
    """Sheffet's σ is proportional to it: two neighbours get noise of different size.

    A database without its longest row has a smaller σ; the paper's Tables use each data set's own.
    """
    data = np.array([[3.0, 4.0], [1.0, 0.0]])
    norms = np.linalg.norm(data, axis=1)
    with_row, without = (
        baselines.sheffet_sigma(norm, 300, 1.0, 1e-4) for norm in (norms.max(), norms[1])
    )
    assert with_row / without == pytest.approx(5.0)


def test_figure_14_releases_a_sketch_without_the_noise_that_it_computes() -> None:
    """Its σ is for Π[B; σI], of n + d rows; its last line releases ΠB, of n, and that is private
    only as far as the row's own leverage lets it be: not at all for a row that stands alone."""
    sigma = baselines.sheffet_sigma(1.0, 40, 1.0, 1e-4)
    regularized = 1 / (1 + sigma**2)
    assert float(projection.epsilon(regularized, 40, 1e-4)) < 1
    assert float(np.exp(projection.log_delta(1.0, 40, 1.0))) == 1


PRINTED = [
    ("M_RP, Cancer", 6.850, lambda: projection.sigma(*noise(CANCER), "paper")),
    ("[15], Cancer", 20.317, lambda: baselines.sheffet_sigma(*noise(CANCER))),
    ("M_LS, Cancer", 7.917, lambda: least_squares_noise(CANCER)),
    ("M_RP, Flight", 0.745, lambda: projection.sigma(*noise(FLIGHT), "paper")),
    ("[15], Flight", 2.060, lambda: baselines.sheffet_sigma(*noise(FLIGHT))),
]


def noise(setup: dict[str, float]) -> tuple[float, float, float, float]:
    """(row norm, r, ε, δ) of Tables II and IV: ε = 1, δ = 1/n."""
    return setup["row_norm"], setup["r"], 1.0, 1 / setup["n"]


def least_squares_noise(setup: dict[str, float]) -> float:
    return least_squares.sigma(*noise(setup)[:2], setup["d"], *noise(setup)[2:], "paper")


@pytest.mark.parametrize(("name", "printed", "computed"), PRINTED, ids=[p[0] for p in PRINTED])
def test_the_printed_noise_is_reproduced(name: str, printed: float, computed: object) -> None:
    """Tables II and IV to their digits, with one row norm for each data set fitted to its rows."""
    assert f"{float(computed()):.3f}" == f"{printed:.3f}"  # type: ignore[operator]


def test_the_printed_noise_that_is_one_digit_off() -> None:
    """Flight: M_LS 0.864 (Table II) comes out as 0.865; [15] at δ = 1e-16, 2.704, as 2.702.

    The row norm cannot make up for it: within what 0.745 and 2.060 leave, at most 2.7034.
    """
    assert least_squares_noise(FLIGHT) == pytest.approx(0.864, rel=1e-3)
    norm, r, *_ = noise(FLIGHT)
    at_limit = baselines.sheffet_sigma(norm, r, 1.0, 1e-16)
    assert at_limit == pytest.approx(2.704, rel=1e-3)
    largest = norm * 2.0605 / baselines.sheffet_sigma(*noise(FLIGHT))
    assert baselines.sheffet_sigma(largest, r, 1.0, 1e-16) < 2.7035
    # "δ <= 1e-16" is what it prints for what it cannot resolve: a δ of 9.3e-17 gives 2.704.
    assert f"{baselines.sheffet_sigma(norm, r, 1.0, 9.3e-17):.3f}" == "2.704"


@pytest.mark.parametrize("n", [515345, 327346])
def test_no_row_norm_explains_the_row_of_song(n: int) -> None:
    """σ_RP = 0.224, [15] 12.496 and M_LS 3.374 (d = 90) cannot be of one row norm, for either n."""
    r, delta = math.floor(math.log(n) / 0.1**2), 1 / n
    norms = [
        0.224 / float(projection.sigma(1.0, r, 1.0, delta, "paper")),
        12.496 / baselines.sheffet_sigma(1.0, r, 1.0, delta),
        3.374 / least_squares.sigma(1.0, r, 90, 1.0, delta, "paper"),
    ]
    assert max(norms) / min(norms) > 10
    # With the row norm that [15] implies, σ_RP is below it: a leverage above 1.
    assert norms[1] > 0.224


def test_a_users_own_table_is_one_of_the_databases(tmp_path: Path) -> None:
    """Tables I to IV on the real tables, where a user has them: the keys of source `table`."""
    draw = np.random.default_rng(0)
    values = draw.uniform(0, 10, (60, 3)).round(3)
    lines = ["a,b,y", *(",".join(map(str, row)) for row in values)]
    (tmp_path / "own.csv").write_text("\n".join(lines), encoding="utf-8")
    ranges = [{"name": name, "low": 0, "high": 10} for name in "aby"]
    source = {"path": str(tmp_path / "own.csv"), "features": ranges[:2], "target": ranges[2]}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(source), encoding="utf-8")
    (found,) = databases([str(tmp_path / "own.yaml")])
    rows = np.sort(values / 5 - 1, axis=0)
    assert found.name == "own" and found.rows == 60
    assert np.diag(found.gram)[-1] == pytest.approx((rows[:, 2] ** 2).sum())


@pytest.mark.parametrize("delta", [1e-200, 1e-9, 1e-3, 0.2, 0.9])
@pytest.mark.parametrize("r", [1, 40, 1000])
def test_the_divergence_is_what_it_may_be(delta: float, r: float) -> None:
    import mpmath as mp

    p = mp.mpf(mutual_information_leverage(delta, r))
    with mp.workdps(30 + int(-2 * math.log10(delta))):
        divergence = r * (p / (1 - p) + mp.log1p(-p)) / 2
        assert float(2 * divergence / mp.mpf(delta) ** 2) == pytest.approx(1, rel=1e-9)


def test_a_row_has_no_more_mutual_information_than_that() -> None:
    """A row that is there or not with equal probability: two normal laws in one dimension."""
    r, delta = 1, 0.3
    p = mutual_information_leverage(delta, r)
    x = np.linspace(-40, 40, 400_001)
    laws = [np.exp(-(x**2) / (2 * v)) / np.sqrt(2 * np.pi * v) for v in (1.0, 1 / (1 - p))]
    middle = sum(laws) / 2
    tiny = 1e-300
    information = sum(law * np.log((law + tiny) / (middle + tiny)) for law in laws).sum() / 2
    information *= x[1] - x[0]
    variation = np.maximum(laws[1] - laws[0], 0).sum() * (x[1] - x[0])
    assert variation == pytest.approx(float(np.exp(projection.log_delta(p, r, 0.0))), rel=1e-4)
    assert variation**2 / 2 <= information <= delta**2 / 2
