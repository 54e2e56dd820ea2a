"""How clients draw their batches: what they compute from them, and what is claimed of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_scenario
from torch import Tensor

import fedsim
from fedsim.contracts.stack import chain
from fedsim.privacy.composition import correlated
from fedsim.privacy.ledger import Entry, claim, worst_client_sizes
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCurve
from fedsim.privacy.numerics import gaussian
from fedsim.recording.files import read_tensors
from fedsim.results import rows
from fedsim.scenario import Scenario
from fedsim.scenario.resolve import resolve
from fedsim.testing.cases import same
from fedsim.training.client import ClientResult
from fedsim.training.schedule import Probe
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, LocalTraining, PrivacyClaim
from fedsim_defenses.correlated_noise import CorrelatedNoise
from fedsim_defenses.dp_sgd import DPSGD

INDEPENDENT = ["poisson", "balls_in_bins"]
EVERY = ["without_replacement", "epochs", *INDEPENDENT]


def noisy(correlation: float, multiplier: float = 2.0, norm: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"name": "correlated_noise", "norm": norm, "noise_multiplier": multiplier}
        | {"correlation": correlation}
    ]


def scenario(sampling: str, **changes: Any) -> Scenario:
    local = {"batch_size": 16, "lr": 0.5, "sampling": sampling, **changes.pop("local", {})}
    training = {"rounds": 4, **changes.pop("training", {}), "local": local}
    base = tiny_scenario(
        data__clients=30,
        model={"name": "kan", "hidden": 2, "intervals": 2},
        training=training,
        observe={"batch_sizes": [2]},
        privacy={"probes": "outside"},
    )
    return resolve({**base, **changes})


def rounds(workload: Workload, count: int, client: int = 1) -> list[ClientResult]:
    """What a client computes in so many rounds, always at the same weights."""
    at, state = workload.initial(), {}
    found = []
    for round in range(1, count + 1):
        found.append(workload.client_update(client, round, *at, state))
        state = dict(found[-1].state)
    return found


def visited(results: list[ClientResult]) -> Counter[bytes]:
    images = torch.cat([result.truth.images for result in results if result.truth])
    return Counter(image.numpy().tobytes() for image in images)


@pytest.mark.parametrize("steps", [1, 3])
def test_an_epoch_of_bins_visits_each_example_once(steps: int) -> None:
    """Local steps and rounds alike; a probe in between takes no turn."""
    workload = Workload(scenario("balls_in_bins", local={"steps": steps}), "none")
    own = workload.parts[1]
    bins = workload.training.bins(len(own))
    assert bins == 3, "the test is about an epoch of three steps"
    stored = workload.dataset.train_images[own].float() / 255  # type: ignore[union-attr]
    once = Counter(image.numpy().tobytes() for image in stored)
    results = rounds(workload, 2 * bins // steps)
    assert visited(results) == once + once
    at = workload.initial()
    state = results[0].state
    probed = workload.client_update(1, 4, *at, state, probe=Probe(batch_size=2, trial=0))
    assert probed.state is state


def test_epochs_take_each_example_once_in_orders_of_their_own() -> None:
    """A last smaller batch is left out, and each round begins an epoch."""
    workload = Workload(scenario("epochs", local={"steps": 7, "batch_size": 13}), "none")
    held = len(workload.parts[1])
    each = held // 13
    assert 7 // each == 2 and held % 13, "the test is about two epochs of an uneven client"
    truths = [result.truth for result in rounds(workload, 2)]
    epochs = []
    for truth in truths:
        assert truth is not None
        seen = [image.numpy().tobytes() for image in truth.images]
        epochs += [seen[: each * 13], seen[each * 13 : 2 * each * 13]]
    assert all(len(set(epoch)) == each * 13 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert len({frozenset(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize("sampling", EVERY)
def test_without_correlation_it_is_dp_sgd_bit_for_bit(sampling: str) -> None:
    stacks = {
        "correlated": noisy(0.0),
        "plain": [{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 2.0}],
    }
    resolved = scenario(sampling, defenses=stacks)
    here, there = (rounds(Workload(resolved, name), 3) for name in stacks)
    for mine, other in zip(here, there, strict=True):
        assert same(mine.update.tensors, other.update.tensors)


@pytest.mark.parametrize("sampling", EVERY)
def test_without_noise_and_bound_it_is_plain_sgd(sampling: str) -> None:
    stacks = {"noisy": noisy(0.7, multiplier=0.0, norm=1e9), "none": []}
    resolved = scenario(sampling, defenses=stacks, local={"steps": 2})
    here, there = (rounds(Workload(resolved, name), 3) for name in stacks)
    for mine, other in zip(here, there, strict=True):
        torch.testing.assert_close(
            dict(mine.update.tensors), dict(other.update.tensors), rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize("sampling", INDEPENDENT)
def test_sums_are_divided_by_the_mean_size(sampling: str) -> None:
    """An update is the mean gradient of its batch, times the batch's share of that size."""
    sampled = Workload(scenario(sampling), "none")
    sizes = set()
    for result in rounds(sampled, 3):
        assert result.truth is not None and result.loss is not None
        count = len(result.truth.labels)
        sizes.add(count)
        fixed = Workload(scenario("without_replacement", local={"batch_size": count}), "none")
        client = replace(fixed.clients[1], own=_indices(sampled, result))
        plain = client.update(fixed, 1, *sampled.initial(), {})
        assert plain.loss is not None
        assert result.loss == pytest.approx(plain.loss * count / 16, rel=1e-5)
        for name, value in result.update.tensors.items():
            torch.testing.assert_close(value, plain.update.tensors[name] * count / 16)
        assert result.update.num_examples == 16, "the size of a batch is secret"
    assert len(sizes) > 1, "the sizes must vary"


def _indices(workload: Workload, result: ClientResult) -> Tensor:
    assert result.truth is not None
    stored = workload.dataset.train_images.float() / 255  # type: ignore[union-attr]
    matches = (stored[None] == result.truth.images[:, None]).flatten(2).all(2)
    return matches.float().argmax(1)


def test_an_empty_batch_releases_noise_alone() -> None:
    """Of mean size 1 among 47, 37% are empty: nothing is released, and nothing that says so."""
    stacks = {"none": [], "noisy": noisy(0.5)}
    resolved = scenario("poisson", defenses=stacks, local={"batch_size": 1})
    plain, private = (rounds(Workload(resolved, name), 12) for name in stacks)
    empty = [bool(r.truth and len(r.truth.labels) == 0) for r in plain]
    assert 0 < sum(empty) < 12
    for is_empty, undefended, noised in zip(empty, plain, private, strict=True):
        still = all(bool((t == 0).all()) for t in undefended.update.tensors.values())
        assert still == is_empty
        assert (undefended.loss == 0) == is_empty
        assert all(bool((t != 0).any()) for t in noised.update.tensors.values())
        assert noised.update.num_examples == 1


@pytest.mark.parametrize("sampling", INDEPENDENT)
def test_a_probe_has_the_batch_that_it_declares(sampling: str) -> None:
    workload = Workload(scenario(sampling), "none")
    at = workload.initial()
    for trial in range(3):
        probe = Probe(batch_size=5, trial=trial)
        result = workload.client_update(0, 4, *at, {}, probe=probe)
        seen = workload.observation(4, 0, result.update, *at, probe=probe)
        assert result.truth is not None
        assert len(result.truth.labels) == 5 == seen.num_images
        assert seen.training.sampling == "without_replacement"


@pytest.mark.usefixtures("attacks_here")
def test_a_federation_goes_on_where_its_clients_were(tmp_path: Path) -> None:
    """Through Flower: the bins take their turns over rounds, and the ledger's ε is the record's."""
    stacks = {"private": noisy(0.5, 4.0)}
    resolved = scenario(
        "balls_in_bins",
        data={"source": {"name": "digits", "size": 8}, "clients": 3},
        defenses=stacks,
        training={"rounds": 3},
        local={"batch_size": 200},
    )
    run = fedsim.run(resolved, out=tmp_path / "run")
    state = read_tensors(tmp_path / "run/client_state/private/client-0002/round-0003.safetensors")
    assert int(state["sampling.steps"]) == 3
    lines = run.rounds()
    assert not any(sum(line["failures"].values()) for line in lines)
    held = rows.spent(Workload(resolved, "private"), 3)
    assert lines[-1]["epsilon"] == held.epsilon
    assert lines[0]["epsilon"] <= lines[1]["epsilon"] <= lines[2]["epsilon"]


def of(sampling: Any, correlation: float, **changes: Any) -> PrivacyClaim:
    steps = changes.pop("steps", 2)
    declared = LocalTraining(
        algorithm="fedavg", steps=steps, batch_size=10, lr=0.1, sampling=sampling
    )
    arguments = {"rounds": 3, "num_examples": 40, "delta": 1e-3, **changes}
    multiplier = arguments.pop("multiplier", 2.0)
    defense = (
        CorrelatedNoise(norm=1.0, noise_multiplier=multiplier, correlation=correlation)
        if correlation
        else DPSGD(norm=1.0, noise_multiplier=multiplier)
    )
    return claim(chain(defense), declared, Entry(**arguments))


@pytest.mark.parametrize(
    ("sampling", "correlation"),
    [
        ("poisson", 0.0),
        ("balls_in_bins", 0.0),
        pytest.param("balls_in_bins", 0.5, marks=pytest.mark.slow),
        pytest.param("poisson", 0.5, marks=pytest.mark.by_hand),
    ],
)
def test_the_ledger_claims_what_the_calculator_says(sampling: Any, correlation: float) -> None:
    found = of(sampling, correlation)
    answer = CorrelatedCurve(
        steps=6,
        sampling_rate=0.25,
        correlation=correlation,
        noise_multiplier=2.0,
        sampling=sampling,
    ).epsilon(1e-3)
    upper = answer.interval[1] if answer.interval else answer.epsilon
    assert found.epsilon == upper >= answer.epsilon
    assert (found.unit, found.relation) == ("example", "zero_out")
    assert found.accountant is not None
    assert ("upper end at 99%" in found.accountant) == (answer.interval is not None)
    assert found.epsilon < of("without_replacement", correlation).epsilon


@pytest.mark.parametrize(("examples", "releases"), [(40, 3), (29, 3), (20, 3), (19, 6), (10, 6)])
def test_an_example_is_in_one_batch_of_an_epoch(examples: int, releases: int) -> None:
    """Two steps of three rounds on batches of 10: the exact curve of its own releases."""
    found = of("epochs", 0.0, num_examples=examples)
    # Another example in its place moves a sum by two bounds.
    assert found.epsilon == gaussian.epsilon(2.0 / 2 / math.sqrt(releases), 1e-3)
    assert (found.unit, found.relation) == ("example", "replace_one")
    once = LocalTraining(algorithm="fedsgd", steps=1, batch_size=10, lr=0.1)
    entry = Entry(rounds=9, num_examples=examples, delta=1e-3)
    alone, drawn = (
        claim(chain(DPSGD(norm=1.0, noise_multiplier=2.0)), replace(once, sampling=each), entry)
        for each in ("epochs", "without_replacement")
    )
    assert alone == drawn, "the first batch of an epoch is drawn as any batch is"
    every = of("epochs", 0.5, num_examples=examples)
    assert every.epsilon == of("without_replacement", 0.5, num_examples=10).epsilon


def test_an_epoch_that_is_begun_counts_whole() -> None:
    """Five steps of epochs of two: an example may be in a batch of each of three orders."""
    found = of("epochs", 0.0, num_examples=20, steps=5)
    assert found.epsilon == gaussian.epsilon(2.0 / 2 / math.sqrt(9), 1e-3)


def test_beyond_the_draws_a_bound_without_any_is_claimed() -> None:
    """A noise that gives ε far in the tail: the batches are then taken to be known."""
    found = of("balls_in_bins", 0.5, multiplier=2.0, delta=1e-80)
    assert found.accountant is not None and "may be known" in found.accountant
    assert 0 < found.epsilon < math.inf
    assert found.epsilon > of("balls_in_bins", 0.5, delta=1e-6).epsilon


@pytest.mark.parametrize("bins", [1, 3, 9])
def test_known_bins_are_the_mean_over_them(bins: int) -> None:
    steps, correlation, noise, epsilon = 7, 0.6, 2.0, 0.8
    decay = torch.tensor(
        [[correlation ** (i - j) if i >= j else 0.0 for j in range(steps)] for i in range(steps)],
        dtype=torch.float64,
    )
    total = 0.0
    for bin in range(bins):
        z = torch.zeros(steps, dtype=torch.float64)
        z[bin::bins] = 1
        reach = float((decay @ z).norm())
        if reach:
            total += math.exp(gaussian.log_delta(noise / reach, epsilon)) / bins
    found = correlated.log_delta_known_bin(
        noise, epsilon, steps=steps, bins=bins, correlation=correlation
    )
    assert math.exp(found) == pytest.approx(total, rel=1e-10)


def test_each_number_of_bins_may_be_the_worst() -> None:
    held = [100, 61, 64, 99, 30]
    declared = LocalTraining(algorithm="fedsgd", steps=1, batch_size=10, lr=0.1)
    assert worst_client_sizes(declared, held) == [30]
    for sampling, expected in (("poisson", [30]), ("balls_in_bins", [30, 61, 99])):
        training = LocalTraining(
            algorithm="fedsgd",
            steps=1,
            batch_size=10,
            lr=0.1,
            sampling=sampling,  # type: ignore[arg-type]
        )
        assert worst_client_sizes(training, held) == expected


@pytest.mark.slow
def test_a_costly_claim_of_a_round_is_that_of_a_later_one() -> None:
    workload = Workload(
        scenario("poisson", defenses={"a": noisy(0.0)}, training={"rounds": 6}), "a"
    )
    found = [rows.spent_by(workload, round).epsilon for round in range(1, 7)]
    exact = [rows.spent(workload, round).epsilon for round in range(1, 7)]
    assert found == [exact[0], exact[1], exact[3], exact[3], exact[5], exact[5]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observe": {"rounds": [1]}}, "add `observe.batch_sizes"),
        ({"observe": {"batch_sizes": [1], "releases": 2}}, "never drawn again"),
        ({"local": {"steps": 2, "batches": "same"}}, "use batches: different"),
        (
            {"defenses": {"a": [{"name": "local_aggregation", "steps": 2, "batches": "same"}]}},
            "use batches: different",
        ),
        ({"local": {"sampling": "poison"}}, "did you mean 'poisson'"),
    ],
)
def test_what_has_no_proof_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FedsimError, match=message):
        scenario("poisson", **changes)
