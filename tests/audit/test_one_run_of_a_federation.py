"""Many canaries in one run: all are found without noise, none behind much, a lie is caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_cases import find_bound
from tiny import tiny_scenario

import fedsim
from fedsim.audit import one_run
from fedsim.report import describe, load_runs, utility
from fedsim.results import rows
from fedsim.scenario.resolve import resolve
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, Tensors
from fedsim.words import format_bound
from fedsim_defenses import dp_sgd

pytestmark = pytest.mark.usefixtures("attacks_here")

AGGREGATE = {"name": "aggregate"}


def client(multiplier: float) -> list[dict[str, Any]]:
    return [{"name": "clip", "norm": 0.5}, {"name": "gaussian_noise", "multiplier": multiplier}]


def example(multiplier: float) -> list[dict[str, Any]]:
    return [{"name": "dp_sgd", "norm": 0.2, "noise_multiplier": multiplier}]


def workload(stack: list[dict[str, Any]], sampling: str = "without_replacement") -> Workload:
    local = {"batch_size": 35, "lr": 0.2, "sampling": sampling}
    if sampling == "balls_in_bins":
        local["batch_size"] = 18
    scenario = resolve(
        tiny_scenario(
            seed=5,
            data__clients=40,
            model={"name": "mlp", "hidden": [16]},
            training={"rounds": 4, "local": local},
            defenses={"tried": stack},
            observe={"batch_sizes": [1]},
            privacy={"probes": "outside"},
            audit={"method": "one_run", "canaries": 1000, "confidence": 0.99},
        )
    )
    return Workload(scenario, "tried", load_dataset(scenario))


def told(audited: Workload) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    claim = rows.spent(audited, 4)
    assert claim.unit is not None
    assert claim.relation is not None
    return one_run.scores(audited, claim.unit, claim.relation, 1000, lambda done, total: None)


def right(audited: Workload) -> float:
    """The share of coins that the median score tells."""
    scores, coins = told(audited)
    return float(np.mean((scores > np.median(scores)) == coins))


EVERY_KIND = [
    pytest.param(client, [], "without_replacement", 40, id="clients"),
    pytest.param(client, [AGGREGATE], "without_replacement", 40, id="clients, aggregated"),
    pytest.param(example, [], "without_replacement", 1000, id="labels", marks=pytest.mark.slow),
    pytest.param(example, [], "poisson", 1000, id="examples, Poisson"),
    pytest.param(
        example, [], "balls_in_bins", 1000, id="examples, balls in bins", marks=pytest.mark.slow
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "behind", "sampling", "canaries"), EVERY_KIND)
def test_hardly_any_noise_shows_all_and_much_shows_none(
    kind: Any, behind: list[dict[str, Any]], sampling: str, canaries: int
) -> None:
    scores, coins = told(workload([*kind(1e-4), *behind], sampling))
    assert len(scores) == len(coins) == canaries
    assert abs(np.mean(coins) - 0.5) < 3 * 0.5 / np.sqrt(canaries)
    ordered = coins[np.argsort(scores)]
    shown = (~ordered[: np.sum(~coins)]).mean()
    assert shown > 0.97
    hidden = right(workload([*kind(1e4), *behind], sampling))
    assert abs(hidden - 0.5) < 3 * 0.5 / np.sqrt(canaries)


@pytest.mark.parametrize(("kind", "behind", "sampling", "canaries"), EVERY_KIND)
def test_a_true_claim_is_not_exceeded(
    kind: Any, behind: list[dict[str, Any]], sampling: str, canaries: int
) -> None:
    audited = workload([*kind(0.5), *behind], sampling)
    bound, claimed = find_bound(audited)
    assert 0 <= bound <= claimed


@pytest.mark.slow
def test_it_is_reproducible_and_leaves_the_workload_as_it_was() -> None:
    audited = workload(example(1.0), "poisson")
    labels = audited.dataset.train_labels.clone()
    first, second = told(audited), told(audited)
    np.testing.assert_array_equal(first, second)
    assert torch.equal(audited.dataset.train_labels, labels)


@pytest.mark.slow
def test_noise_that_was_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An honest claim of ε = 3 stands, and one whose noise is a tenth of it falls."""
    audited = workload(example(5.5))
    honest, claimed = find_bound(audited)
    assert honest <= claimed < 3.5

    def lying(update: Tensors, std: float, rng: torch.Generator) -> Tensors:
        return {
            name: tensor + 0.1 * std * torch.randn(tensor.shape, generator=rng)
            for name, tensor in update.items()
        }

    monkeypatch.setattr(dp_sgd, "add_gaussian", lying)
    assert find_bound(audited)[0] > claimed


@pytest.mark.slow
def test_a_finished_audit_is_not_lost_and_is_told_where_nothing_is_attacked(tmp_path: Path) -> None:
    scenario = workload(client(0.5)).scenario
    out = tmp_path / "run"
    fedsim.run(scenario, out=out, workers=1)
    (line,) = (out / "audit.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["defense"], found["method"], found["holds"]) == ("tried", "one_run", True)
    told = describe(utility(load_runs([out])))
    assert f"audit: at least {format_bound(found['audited_epsilon'])}" in told
    assert "Audited" in (out / "report.html").read_text()

    (out / "audit.jsonl").write_text(json.dumps({**found, "audited_epsilon": 0.125}) + "\n{")
    fedsim.run(scenario, out=out, workers=1, resume=True)
    assert "audit: at least 0.125" in describe(utility(load_runs([out])))


def test_too_few_clients_and_too_many_canaries_for_one_run_are_refused(tmp_path: Path) -> None:
    clients, examples = workload(client(0.5)).scenario, workload(example(0.5)).scenario
    assert examples.audit is not None
    few = clients.model_copy(update={"data": clients.data.model_copy(update={"clients": 19})})
    canaries = examples.audit.model_copy(update={"canaries": 10_001})
    many = examples.model_copy(update={"audit": canaries})
    for refused, said in (
        (few, "whole clients, of which 19 in one run show too little"),
        (many, r"audit\.canaries: 10001 in one run"),
    ):
        with pytest.raises(FedsimError, match=said):
            fedsim.run(refused, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()
