"""An ε asked for: the noise found is enough, hardly more, and the same for everybody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from slow_cases import slow_but

from fedsim.contracts.stack import chain
from fedsim.privacy import calculator
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCurve
from fedsim.privacy.numerics import work
from fedsim.scenario import Scenario, expand
from fedsim.testing.cases import local_step
from fedsim.training import accounting, spending
from fedsim.training.accounting import account_of
from fedsim.training.schedule import Probe
from fedsim.training.server import Census
from fedsim.training.source import load_dataset
from fedsim.training.workload import OneClient, Workload
from fedsim.types import Dataset, FedsimError, as_pixels
from fedsim_defenses.dp_sgd import DPSGD


def scenario(
    *, epsilon: float = 8.0, rounds: int = 5, steps: int = 2, clients: int = 4, **more: Any
) -> Scenario:
    sampling = more.pop("sampling", "without_replacement")
    member = {"name": "dp_sgd", "norm": 1.0, "epsilon": epsilon, **more.pop("member", {})}
    document = {
        "name": "t",
        "data": {"source": {"name": "digits", "size": 8}, "clients": clients},
        "model": {"name": "mlp", "hidden": [4]},
        "training": {
            "rounds": rounds,
            "local": {"steps": steps, "batch_size": 20, "sampling": sampling},
        },
        "defenses": {"none": [], "dp": [*more.pop("before", []), member]},
        "attacks": [],
        **more,
    }
    return expand(document)[0].scenario


def noise(made: Scenario) -> float:
    ((_, found),) = spending.found_noises(Workload(made, "dp").stack)
    return found


OUTSIDE = {"observe": {"batch_sizes": [1]}, "privacy": {"probes": "outside"}}
CASES: list[dict[str, Any]] = [
    {},
    {"epsilon": 0.5},
    {"epsilon": 300.0, "steps": 1},
    {"rounds": 40, "federation": {"participation": 0.5}},
    {"observe": {"batch_sizes": [1, 5], "trials": 2, "rounds": [1, 3]}},
    {"observe": {"batch_sizes": [2], "releases": 3}},
    {"before": [{"name": "local_aggregation", "steps": 3}], "steps": 1},
    {"sampling": "poisson", **OUTSIDE},
]


@pytest.mark.parametrize("case", slow_but(map(str, CASES[:3]), {str(case): case for case in CASES}))
def test_the_ledger_keeps_to_what_is_asked_and_hardly_below(case: dict[str, Any]) -> None:
    made = scenario(**case)
    workload = Workload(made, "dp")
    held = accounting.spent(workload, made.training.rounds)
    assert 0.99 * case.get("epsilon", 8.0) <= held.epsilon <= case.get("epsilon", 8.0)
    assert held.unit == "example" and held.delta == 1e-5
    accounting.check_promise(workload)


def test_dp_accounting_agrees_without_replacement() -> None:
    made = scenario(rounds=7, steps=3)
    peer = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    held = min(Workload(made, "dp").census.held)
    # Exchanging an example moves the sum by up to 2 C.
    release = SampledWithoutReplacementDpEvent(held, 20, GaussianDpEvent(noise(made) / 2))
    peer.compose(release, 21)
    assert 0.99 * 8 <= peer.get_epsilon(1e-5) <= 8


@pytest.mark.slow
def test_dp_accounting_agrees_by_poisson() -> None:
    made = scenario(rounds=7, steps=3, sampling="poisson", **OUTSIDE)
    held = min(Workload(made, "dp").census.held)
    peer = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    peer.compose(PoissonSampledDpEvent(20 / held, GaussianDpEvent(noise(made))), 21)
    assert 0.99 * 8 <= peer.get_epsilon(1e-5) <= 8 * 1.001


def equal_images(made: Scenario, few: int) -> Dataset:
    """The scenario's data, of which all images but the first `few` are one."""
    dataset = load_dataset(made)
    assert isinstance(dataset, Dataset)
    images = dataset.train_images.clone()
    images[few:] = images[few]
    return replace(dataset, train_images=images)


@pytest.mark.slow
def test_probes_of_equal_images_have_no_epsilon() -> None:
    """Of equal images a probe draws one: another is drawn more often than one in all of them."""
    observed = {"observe": {"batch_sizes": [1], "trials": 2}}
    made = scenario(clients=1, rounds=1, steps=1, member={"epsilon": 8.0}, **observed)
    data = equal_images(made, few=9)
    workload = Workload(made, "none", data)
    client, drawn = workload.clients[0], 0
    for round in range(200):
        probe = Probe(batch_size=1, trial=0)
        probed = client._batches(workload.declared.as_probed(1), round, probe, 0, 2)
        drawn += bool((probed[0][0] == as_pixels(data.train_images[:1])).all())
    assert drawn / 200 > 10 / len(client.own), "the first image, one of ten different ones"
    with pytest.raises(FedsimError, match=r"cannot be promised.*equal images.*probes: outside"):
        accounting.check_promise(Workload(made, "dp", data))
    outside = scenario(clients=1, rounds=1, steps=1, privacy={"probes": "outside"}, **observed)
    accounting.check_promise(Workload(outside, "dp", data))
    accounting.check_promise(Workload(made, "dp"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"sampling": "poisson", "observe": {"batch_sizes": [1]}},
            r"defenses.dp\[0\]: epsilon: 8 .*privacy.probes: outside",
        ),
        (
            {"before": [{"name": "dp_sgd", "norm": 1.0, "epsilon": 3.0}]},
            "two defenses ask for an ε",
        ),
    ],
)
def test_what_cannot_be_claimed_says_why(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(FedsimError, match=said):
        Workload(scenario(**changes), "dp")


@pytest.mark.slow
def test_the_smallest_client_decides() -> None:
    uneven = {"data": {"source": {"name": "digits", "size": 8}, "clients": 2}}
    made = scenario(**uneven)
    written = chain(DPSGD(norm=1.0, epsilon=8.0))
    account = account_of(Workload(made, "dp"))

    def found(*held: int) -> float:
        stack = spending.calibrate_noise(written, replace(account, held=held), "p")
        return spending.found_noises(stack)[0][1]

    assert found(700, 60) == found(60, 60) > found(700, 700)
    assert found(0, 60) == found(60, 60), "a count that is not known is no count of nothing"


@pytest.mark.slow
def test_a_search_over_uneven_bins_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more noise than the worst client takes, of few curves, with word of how far it is."""
    made = scenario(sampling="balls_in_bins", rounds=20, **OUTSIDE)
    workload = Workload(made, "none")
    asked, told = [], []
    claimed = CorrelatedCurve.claim

    def counted(curve: CorrelatedCurve, *given: Any) -> tuple[float, str]:
        asked.append(curve.sampling_rate)
        return claimed(curve, *given)

    monkeypatch.setattr(CorrelatedCurve, "claim", counted)
    held = [112, 133, 193, 233]
    account = replace(account_of(workload), held=held)
    with work.heard_by(lambda done, total: told.append(done / total)):
        stack = spending.calibrate_noise(chain(DPSGD(norm=1.0, epsilon=8.0)), account, "p")
    assert len(asked) <= 10
    assert told == sorted(told) and len(told) > 100 and told[-1] <= 1
    spent = {
        count: claim(
            stack, workload.declared, Entry(rounds=20, num_examples=count, delta=1e-5)
        ).epsilon
        for count in held
    }
    assert 0.99 * 8 <= max(spent.values()) <= 8


@pytest.mark.slow
def test_a_node_finds_the_noise_of_all() -> None:
    made = scenario(clients=3)
    whole = Workload(made, "dp")
    for client in whole.clients:
        census = Census(held=whole.census.held, private_statistics={})
        one = OneClient(made, "dp", client, census)
        assert spending.found_noises(one.stack) == spending.found_noises(whole.stack)
        assert one.stack == whole.stack


@pytest.mark.slow
def test_a_server_that_misstates_counts_gets_more_noise_or_none() -> None:
    made = scenario(clients=3)
    whole = Workload(made, "dp")
    held = list(whole.census.held)
    least = noise(made)
    fewer = Census(held=[held[0], 30, 30], private_statistics={})
    assert spending.found_noises(OneClient(made, "dp", whole.clients[0], fewer).stack)[0][1] > least
    many = Census(held=[held[0], 10**6, 10**6], private_statistics={})
    ((_, found),) = spending.found_noises(OneClient(made, "dp", whole.clients[0], many).stack)
    keys = {"examples": held[0], "batch_size": 20, "rounds": 5, "steps": 2}
    own = calculator.epsilon("dp_sgd", {**keys, "noise_multiplier": found}, delta=1e-5)
    assert own.epsilon <= 8, "its own images are protected as asked, whatever it is told"
    with pytest.raises(FedsimError, match="the server counts"):
        OneClient(made, "dp", whole.clients[0], Census(held=[10**6] * 3, private_statistics={}))


def test_what_is_announced_has_the_noise_and_the_scenario_has_not() -> None:
    made = scenario()
    workload = Workload(made, "dp")
    (seen,) = workload.recordings()
    (member,) = seen.defense
    assert member == {
        "name": "dp_sgd",
        "norm": 1.0,
        "epsilon": 8.0,
        "noise_multiplier": noise(made),
    }
    assert made.defenses["dp"][0].parameters == {"norm": 1.0, "epsilon": 8.0}
    assert seen.effect.noise[0].variance == pytest.approx((noise(made) / 20) ** 2)


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ({"noise_multiplier": 1.0}, "both noise_multiplier and epsilon are given"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": None, "noise_multiplier": 1.0, "delta": 1e-5}, "delta belongs to epsilon"),
    ],
)
def test_one_of_epsilon_and_noise(member: dict[str, Any], said: str) -> None:
    with pytest.raises(FedsimError, match=said):
        scenario(member=member)


@pytest.mark.slow
def test_a_promise_that_cannot_be_kept_is_refused() -> None:
    partition = {
        "source": {"name": "digits", "size": 8},
        "partition": {"name": "dirichlet", "alpha": 5.0},
    }
    made = scenario(data=partition)
    said = r"defenses.dp: epsilon: 8 at δ = 1e-05 per example cannot be promised: .*labels"
    with pytest.raises(FedsimError, match=said):
        accounting.check_promise(Workload(made, "dp"))


def test_without_its_noise_it_claims_nothing_and_does_not_train() -> None:
    bare, declared = DPSGD(norm=1.0, epsilon=8.0), Workload(scenario(), "none").declared
    found = claim(chain(bare), declared, Entry(rounds=1, num_examples=300, delta=1e-5))
    assert found.epsilon == float("inf")
    with pytest.raises(FedsimError, match="give noise_multiplier elsewhere"):
        bare.gradient(local_step(lambda *_: None, lambda *_: {}, 4))  # type: ignore[arg-type,return-value]
