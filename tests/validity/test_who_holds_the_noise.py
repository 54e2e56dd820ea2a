"""What is claimed against whoever holds a part of the noise, or sees what an ideal would hide."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from tiny import tiny_scenario

from fedsim.contracts.guarantee import Release
from fedsim.contracts.stack import chain
from fedsim.federation import refusals
from fedsim.privacy.ledger import Entry, claim
from fedsim.scenario.resolve import resolve
from fedsim.training import accounting
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, LocalTraining
from fedsim_defenses.random_projection import RandomProjection
from fedsim_defenses.secure_aggregation import SecureAggregation

DELTA = 1e-5
RELEASE = Release(kind="sketch", row_norm=1.5, columns=40, features=4)
DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1)


def gaussian_epsilon(noise: float) -> float:
    """The exact ε of one Gaussian release (Balle and Wang 2018), by its formula."""
    mu = 1 / noise

    def excess(eps: float) -> float:
        near, far = norm.cdf(mu / 2 - eps / mu), norm.logcdf(-mu / 2 - eps / mu)
        return float(near - math.exp(eps + far)) - DELTA

    return float(brentq(excess, 0, 100, xtol=1e-12))


def noisy(secure: dict[str, Any], clients: int) -> Workload:
    made = resolve(
        tiny_scenario(
            data__clients=clients,
            training={"rounds": 2, "local": {"batch_size": 2}},
            observe={"rounds": [1], "vantages": ["server", "client"]},
            defenses={
                "noisy": [{"name": "clip", "norm": 1.0}, {"name": "secure_aggregation", **secure}]
            },
            privacy={"delta": DELTA},
        )
    )
    return Workload(made, "noisy")


def watched(secure: dict[str, Any], clients: int) -> dict[str, float]:
    workload = noisy(secure, clients)
    found = {seen.vantage: seen for seen in workload.recordings() if seen.client < 1}
    return {
        vantage: accounting.claim_of(workload, found[vantage]).epsilon
        for vantage in ("aggregate", "client")
    }


def test_a_participant_of_a_noisy_sum_knows_its_own_share_of_the_noise() -> None:
    found = watched({"noise_multiplier": 2.0}, clients=3)
    assert found["aggregate"] == pytest.approx(gaussian_epsilon(2.0))
    # a sum of 2 of 3 opens, and one of the two looks
    assert found["client"] == pytest.approx(gaussian_epsilon(2.0 / math.sqrt(2)))


def test_a_run_is_accounted_against_who_looks() -> None:
    """Two rounds: what a leaderboard shows beside the participant's row."""
    workload = noisy({"noise_multiplier": 2.0}, clients=3)
    for vantage, noise in (("aggregate", 2.0), ("client", 2.0 / math.sqrt(2))):
        found = accounting.spent(workload, 2, seen_from=vantage)  # type: ignore[arg-type]
        assert found.epsilon == pytest.approx(gaussian_epsilon(noise / math.sqrt(2)))


def test_a_participant_may_be_one_of_those_that_collude() -> None:
    terms = {"noise_multiplier": 2.0, "threshold": 0.8, "colluding": 0.25}
    found = watched(terms, clients=8)
    assert found["client"] == pytest.approx(found["aggregate"])


def test_of_two_the_one_that_looks_hides_nothing() -> None:
    found = watched({"noise_multiplier": 2.0, "threshold": 0.6}, clients=2)
    # 0.2 of a client's noise are sure beside the watcher's
    assert found["client"] == pytest.approx(gaussian_epsilon(2.0 * math.sqrt(0.2 / 1.2)))


@pytest.mark.parametrize("leverage", [1.0, 0.3])
def test_shared_noise_is_without_that_of_the_clients_that_collude(leverage: float) -> None:
    """Of four, one colludes: three quarters of σ² are left."""
    shared = RandomProjection(epsilon=1.0, delta=DELTA, shared_among=4, leverage=leverage)
    own = shared.sigma(RELEASE)
    left = 1 / (1 / leverage + 3 * (own / RELEASE.row_norm) ** 2)

    def stated(colluding: float) -> float:
        secure = SecureAggregation(range=100.0, threshold=0.8, colluding=colluding)
        return claim(
            chain(shared, secure),
            DECLARED,
            Entry(rounds=1, num_examples=9, delta=DELTA, release=RELEASE),
        ).epsilon

    expected = brentq(
        lambda eps: _projection_delta(left, RELEASE.columns, eps) - DELTA, 1e-3, 50, xtol=1e-12
    )
    assert stated(0.25) == pytest.approx(expected, rel=1e-6)
    assert stated(0.0) == pytest.approx(1.0, rel=1e-6)


def _projection_delta(leverage: float, columns: int, epsilon: float) -> float:
    """δ of r draws of N(0, 1) against N(0, 1 - p), the larger of both ways, by gamma tails."""
    from scipy.stats import chi2

    found = []
    for first, second in ((1.0, 1 - leverage), (1 - leverage, 1.0)):
        # the log density ratio of a sum of squares s is linear in s
        slope = (1 / second - 1 / first) / 2
        edge = (epsilon - columns / 2 * math.log(second / first)) / slope
        tail = chi2.sf if slope > 0 else chi2.cdf
        found.append(
            float(tail(edge / first, columns) - math.exp(epsilon) * tail(edge / second, columns))
        )
    return max(found)


def shared_by_four(engine: str, *, clients: int = 4, secure: dict[str, Any] | None = None) -> Any:
    last = "aggregate" if secure is None else {"name": "secure_aggregation", **secure}
    noise = {"name": "random_projection", "epsilon": 1.0, "delta": DELTA, "shared_among": 4}
    made = resolve(
        {
            "name": "shared",
            "data": {
                "source": {"name": "breast_cancer", "features": ["mean radius", "mean area"]},
                "clients": clients,
            },
            "learner": {"name": "sketch", "columns": 40},
            "training": {"rounds": 1},
            "attacks": [],
            "defenses": {"shared": [noise, last]},
            "privacy": {"delta": DELTA},
        }
    )
    federation = made.federation.model_copy(update={"engine": engine})
    return Workload(made.model_copy(update={"federation": federation}), "shared")


def test_a_deployments_own_server_has_each_release_behind_an_ideal() -> None:
    assert accounting.spent(shared_by_four("local"), 1).epsilon == pytest.approx(1.0, rel=1e-6)
    deployed = shared_by_four("deployment")
    alone = deployed.stack.guarantees(deployed.declared, deployed.release)[0].mechanism
    assert accounting.spent(deployed, 1).epsilon == alone.epsilon(DELTA, 1) > 2
    hidden = shared_by_four("deployment", secure={"range": 1e6})
    assert accounting.spent(hidden, 1).epsilon == pytest.approx(1.0, rel=1e-6)


def test_more_may_collude_than_share_the_noise() -> None:
    wanted = shared_by_four("local", clients=8, secure={"range": 1e6, "colluding": 0.25})
    with pytest.raises(FedsimError, match="collude"):
        refusals._enough_share_the_noise(wanted)
