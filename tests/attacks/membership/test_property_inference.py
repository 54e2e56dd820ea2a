"""Shares of classes read from updates by shadows, on data whose shares are known."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fedsim
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.contracts.metric import ScoringError
from fedsim.contracts.target import GuessRequest, Resources
from fedsim.targets.shares import (
    ClassShares,
    ClientClassShares,
    ClientColumnShares,
    class_share_error,
    client_class_error,
    client_column_error,
)
from fedsim.testing.cases import make_observation
from fedsim.types import GroundTruth, LocalTraining, Reconstruction
from fedsim_attacks.membership.property_inference import (
    PropertyInference,
    _Estimate,
    _of_clients,
    _ridge,
)

CLASSES, BATCH = 4, 40
SGD = LocalTraining(algorithm="fedavg", steps=2, batch_size=BATCH // 2, lr=0.1)


def draw(labels, seed):
    """Images of 3x3 pixels whose brightest one tells the class."""
    noise = torch.rand(len(labels), 1, 3, 3, generator=torch.Generator().manual_seed(seed))
    images = 0.4 * noise
    images.view(len(labels), 9)[torch.arange(len(labels)), labels] += 0.6
    return images


@pytest.fixture
def known():
    labels = torch.arange(200) % CLASSES
    images = (draw(labels, 1) * 255).round().to(torch.uint8)
    return Knowledge(grant=Grant.least(public="test"), public_images=images, public_labels=labels)


def observe(labels, **changes):
    settings = {"model": "mlp", "model_parameters": {"hidden": [8]}, "training": SGD}
    return make_observation(draw(labels, 2), labels, num_classes=CLASSES, **{**settings, **changes})


SUM = {"defense": [{"name": "aggregate"}], "num_clients": 2}


@pytest.mark.parametrize(
    ("shares", "case"), [((34, 2, 2, 2), {}), ((0, 20, 20, 0), {}), ((40, 40, 0, 0), SUM)]
)
def test_shares_are_read_from_an_update_or_a_sum(shares, case, known):
    """Of a sum those of all its clients together."""
    labels = torch.arange(CLASSES).repeat_interleave(torch.tensor(shares))
    if not case:
        labels = labels[torch.randperm(BATCH, generator=torch.Generator().manual_seed(0))]
    observation, truth = observe(labels, **case)
    answer = solve(PropertyInference(), observation, known, seed=0).reconstruction
    target = ClassShares()
    found = target.answer_of(answer)
    target.check(found, truth)
    assert class_share_error(found, target.truth_of(truth)) < 0.15
    assert class_share_error(torch.full((CLASSES,), 0.25), target.truth_of(truth)) > 0.4


def sums(pairs, shares=((36, 2, 2), (2, 36, 2), (2, 2, 36))):
    """Sums of these pairs of clients, and the classes of each client as shares (3, 4)."""
    stream = torch.Generator().manual_seed(0)
    own = [torch.arange(3).repeat_interleave(torch.tensor(each)) for each in shares]
    found = []
    for number, pair in enumerate(pairs, 1):
        labels = torch.cat([own[k][torch.randperm(BATCH, generator=stream)] for k in pair])
        seen, truth = observe(labels, **SUM)
        found.append(replace(seen, round=number, client=-1, participants=pair))
    true = torch.stack([torch.bincount(each, minlength=CLASSES) / BATCH for each in own])
    return tuple(found), truth, true


def test_each_clients_shares_are_told_apart_by_who_takes_part(known):
    rounds, truth, true = sums([(0, 1), (1, 2), (0, 2)])
    known = replace(known, seen=rounds)
    answer = solve(PropertyInference(of="clients"), rounds[-1], known, seed=0).reconstruction
    target = ClientClassShares()
    found, left = target.answer_of(answer), replace(truth, more={target.part: true[[0, 2]]})
    target.check(found, left)
    assert client_class_error(found, true[[0, 2]]).max() < 0.25
    # The two stand in the order of the clients, and the mean of all would be far from either.
    assert client_class_error(found.flip(0), true[[0, 2]]).min() > 0.5
    assert client_class_error(true.mean(0).expand(2, -1), true[[0, 2]]).min() > 0.5


@pytest.mark.parametrize("pairs", [[(0, 1)], [(0, 1)] * 4, [(0, 1), (0, 2)]], ids=str)
def test_clients_that_sums_do_not_tell_apart_are_refused(pairs, known):
    rounds, *_ = sums(pairs)
    with pytest.raises(AttackFailed, match=r"tell \d of them apart.*participation"):
        solve(PropertyInference(of="clients"), rounds[-1], replace(known, seen=rounds), seed=0)


def test_what_cannot_be_answered_is_refused(known):
    seen = replace(sums([(0, 1)])[0][0], participants=())
    with pytest.raises(AttackFailed, match="who took part in a sum is not recorded"):
        solve(PropertyInference(of="clients"), seen, replace(known, seen=(seen,)), seed=0)
    with pytest.raises(ValueError, match="add `of: clients`"):
        PropertyInference(columns=("sex",))
    observation, _ = observe(torch.arange(BATCH) % CLASSES)
    with pytest.raises(AttackFailed, match="there is no column 'sex'"):
        solve(PropertyInference(of="clients", columns=("sex",)), observation, known, seed=0)
    with pytest.raises(AttackFailed, match="public: test"):
        solve(PropertyInference(), observation, Knowledge(), seed=0)


def test_columns_of_a_table_and_all_data_of_a_client_are_scored(tmp_path):
    asked = {"name": "property_inference", "of": "clients", "shadows": 32}
    skew = {"name": "dirichlet", "alpha": 0.3}
    scenario = {
        "name": "columns",
        "seed": 3,
        "data": {"source": "breast_cancer", "clients": 3, "partition": skew},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"rounds": 10, "local": {"steps": 4, "batch_size": 20, "lr": 0.1}},
        "federation": {"participation": 0.67},
        "defenses": {"sum": ["aggregate"]},
        "attacks": [{**asked, "label": "mix"}, {**asked, "columns": ["worst radius"]}],
        "observe": {"rounds": list(range(1, 11)), "clients": "all"},
        "knowledge": {"public": "test"},
    }
    fedsim.run(scenario, out=tmp_path, workers=1)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    # All rounds are one question, at the last of them.
    assert [row["round"] for row in rows] == [10, 10]
    found = {row["attack"]["label"]: row for row in rows}
    for label, name in (("mix", "class"), ("property_inference", "column")):
        row, name = found[label], f"client_{name}_error"
        assert row["status"] == "ok", row["reason"]
        assert row["metrics"][name] < row["baseline"][name]


def test_columns_that_nobody_answered_do_not_count():
    claimed, true = torch.tensor([[-1, 0.5, 0.1]]), torch.tensor([[0.9, 0.3, 0.1]])
    assert client_column_error(claimed, true).tolist() == pytest.approx([0.1])
    truth = GroundTruth(
        images=torch.zeros(1, 3), labels=torch.zeros(1), more={"client_column_shares": true}
    )
    ClientColumnShares().check(claimed, truth)
    with pytest.raises(ScoringError, match="no column is answered"):
        ClientColumnShares().check(torch.full((1, 3), -1.0), truth)


def test_left_out_error_is_that_of_fits_without_each_shadow():
    stream = torch.Generator().manual_seed(0)
    updates = torch.randn(12, 30, generator=stream, dtype=torch.float64)
    updates = updates - updates.mean(0)
    shares = torch.rand(12, 3, generator=stream, dtype=torch.float64)
    shares = shares - shares.mean(0)
    gram, expected = updates @ updates.T, []
    for ridge in (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0):
        added = ridge * gram.diagonal().mean()
        errors = []
        for left in range(12):
            kept = torch.arange(12) != left
            own = gram[kept][:, kept] + added * torch.eye(11, dtype=torch.float64)
            guess = gram[left, kept] @ torch.linalg.solve(own, shares[kept])
            errors.append((shares[left] - guess).abs().mean())
        expected.append(float(torch.stack(errors).mean()))
    _, missed = _ridge(updates, shares, updates[0])
    assert float(missed.abs().mean()) == pytest.approx(min(expected), rel=1e-9)


def test_rounds_that_tell_little_count_little_and_noise_averages_out():
    stream = torch.Generator().manual_seed(0)
    true = torch.tensor([[0.9], [0.5], [0.1]], dtype=torch.float64)
    part = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]] * 20, dtype=torch.float64) / 2
    noise = torch.where(torch.arange(60) % 2 == 0, 0.02, 2.0)[:, None]
    sums = part @ true + noise * torch.randn(60, 1, generator=stream, dtype=torch.float64)
    each = [
        _Estimate(shares=total, unbiased=total, variance=float(spread) ** 2, lost=0.0)
        for total, spread in zip(sums, noise, strict=True)
    ]
    assert (_of_clients(part, each, [0, 1, 2]) - true).abs().max() < 0.05
    alike = [replace(one, variance=1.0) for one in each]
    assert (_of_clients(part, alike, [0, 1, 2]) - true).abs().max() > 0.1


def test_error_is_the_share_of_examples_that_would_have_to_change():
    assert class_share_error(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.25, 0.25])) == 0.25
    assert class_share_error(torch.tensor([1.0]), torch.tensor([0.0, 1.0])) == 1.0


@pytest.mark.parametrize(
    ("target", "answers"),
    [
        (ClassShares(), [[0.5, 0.6], [1.5, -0.5], [[1.0]]]),
        # Zeros would be within 1/2 of any client, which no distribution is without knowing it.
        (ClientClassShares(), [[[0.0, 0.0]], [[1.5, -0.5]]]),
    ],
)
def test_answers_that_are_no_distribution_are_refused(target, answers):
    more = {"client_class_shares": torch.tensor([[1.0, 0.0]])}
    truth = GroundTruth(images=torch.zeros(2, 1, 1, 1), labels=torch.tensor([0, 1]), more=more)
    for answer in answers:
        with pytest.raises(ScoringError, match="sum to 1"):
            target.check(torch.tensor(answer), truth)


def test_a_guesser_of_a_batchs_shares_knows_those_of_public_examples():
    batch = GroundTruth(images=torch.zeros(4, 1, 1, 1), labels=torch.tensor([0, 0, 0, 1]))
    target = ClassShares()
    found = Reconstruction(more={"class_shares": torch.tensor([0.5, 0.5])}, loss=0, iterations=0)
    asked = GuessRequest(truth=batch, found=found)
    public = SimpleNamespace(public_labels=lambda: torch.tensor([0, 0, 0, 1]))
    for guesser, error in ((public, 0.0), (None, 0.25)):
        aids = {"class_shares": target.prepare(Resources(guesser=guesser))}
        guessed = target.guess(asked, aids)
        assert guessed.metrics["class_share_error"] == error
