"""Numbers beside the leakage: pairing, chance, noise of trials, claims, exits and seconds."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import pytest
import torch
import typer
from test_leaderboard import board, line
from torch import Tensor

from fedsim.attacking.jobs import seed_of
from fedsim.audit.mechanisms import MechanismVerdict
from fedsim.cli import commands
from fedsim.cli.shared import exits
from fedsim.contracts.attack import solve
from fedsim.contracts.grant import Knowledge
from fedsim.contracts.metric import match
from fedsim.data.bundled import Digits
from fedsim.report.leaderboard import accuracy_of, count_images
from fedsim.report.row import LeaderboardRow
from fedsim.results import rows
from fedsim.results.lines import ResultRow, UtilityOf
from fedsim.scoring import accuracy, false_certificates, share
from fedsim.testing import make_observation
from fedsim.training.client import Client
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.types import (
    FedsimError,
    GroundTruth,
    Observation,
    PrivacyClaim,
    Reconstruction,
    RunFailed,
)
from fedsim_attacks._attack_kinds import DirectAttack

PICTURES = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def one_line(folder: Path, lines: list[dict[str, Any]]) -> LeaderboardRow:
    (found,) = board(folder, lines)
    return found


def test_pairs_are_of_least_squared_error_and_not_of_least_distance() -> None:
    """Distances of 3 and 3 have the squares 18; those of 0 and 5 have less in sum, and 25."""
    truth = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    claimed = torch.tensor([[0.0, 0.0], [-7 / 6, math.sqrt(9 - 49 / 36)]])
    assert match(claimed, truth) == [1, 0]


def test_trials_that_share_an_image_count_as_their_mean(tmp_path: Path) -> None:
    lines = [line(psnr, trial=t) for t, psnr in enumerate((10.0, 20.0, 14.0))]
    for row, victim in zip(lines, ("a", "a", "b"), strict=True):
        row["victims"] = [victim]
    row = one_line(tmp_path, lines)
    assert row.independent == 2 and row.metrics["psnr"] is not None
    assert row.metrics["psnr"].mean == pytest.approx(14.5)
    assert count_images([ResultRow.model_validate(each) for each in lines]) == 2


@pytest.mark.parametrize(("cosine", "false"), [(0.9995, 0), (0.995, 1), (0.95, 1)])
def test_a_certificate_is_false_below_its_cosine(cosine: float, false: int) -> None:
    features = torch.tensor([[cosine, math.sqrt(1 - cosine**2)]])
    labels = torch.tensor([3])
    found = Reconstruction(
        features=features, labels=labels, certified=torch.tensor([True]), loss=0.0, iterations=1
    )
    truth = GroundTruth(
        images=torch.zeros(1, 1, 2, 2), labels=labels, features=torch.tensor([[1.0, 0.0]])
    )
    assert false_certificates(found, truth) == false


def test_chance_is_the_share_of_the_most_frequent_class() -> None:
    data = Digits().load()
    uneven = replace(data, test_labels=torch.where(data.test_labels < 7, 0, data.test_labels))
    server: Any = SimpleNamespace(described=uneven)
    examples, chance = Server.test_set(server)
    assert examples == len(uneven.test_labels)
    assert chance == pytest.approx(float((uneven.test_labels == 0).double().mean()))


def test_a_claim_below_its_lower_bound_does_not_hold() -> None:
    verdict = MechanismVerdict(
        claim=1.0, lower_bound=1.2, bounds={}, delta=1e-5, confidence=0.99, draws=1, seed=0,
        unit="example", neighbours="",
    )  # fmt: skip
    assert not verdict.holds
    assert replace(verdict, lower_bound=0.9).holds


def test_each_trial_has_noise_of_its_own() -> None:
    client = Client(number=0, dataset=Digits().load(), own=torch.arange(9), seed=0)

    def drawn(size: int, trial: int) -> Tensor:
        stream: Any = client.sum_stream(1, Probe(batch_size=size, trial=trial), {}, {})
        return torch.rand(3, generator=stream)

    first = drawn(1, 0)
    assert torch.equal(first, drawn(1, 0))
    assert not torch.equal(first, drawn(1, 1)) and not torch.equal(first, drawn(2, 0))


def test_an_attack_starts_elsewhere_for_each_victim() -> None:
    seen, _ = make_observation(PICTURES, torch.tensor([0, 1]))
    changes: list[dict[str, Any]] = [{}, {"trial": 1}, {"client": 1}, {"round": 7}]
    seeds = {seed_of(replace(seen, **change), "a") for change in changes}
    assert len(seeds) == len(changes)


@pytest.mark.parametrize(("error", "status"), [(FedsimError("x"), 2), (RunFailed("x"), 1)])
def test_a_refusal_and_a_failure_end_with_statuses_of_their_own(
    error: FedsimError, status: int
) -> None:
    with pytest.raises(typer.Exit) as ended, exits():
        raise error
    assert ended.value.exit_code == status


def test_a_broken_limit_ends_with_a_status() -> None:
    with pytest.raises(typer.Exit) as ended:
        commands._judge(["a limit is broken"], "")
    assert ended.value.exit_code == 1
    commands._judge([], "all are kept")


def test_seconds_are_those_of_all_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    @final
    class Slow(DirectAttack):
        def reconstruct(
            self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
        ) -> Reconstruction:
            clock[0] += 2.0
            return Reconstruction(labels=torch.tensor([0, 0]), loss=1.0, iterations=4)

    seen, _ = make_observation(PICTURES, torch.tensor([0, 1]))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    found = solve(Slow(), seen, Knowledge(), seed=1, restarts=3)
    assert (found.seconds, found.iterations) == (6.0, 12)


def test_bytes_of_a_client_are_over_those_who_answered() -> None:
    row = {"participants": [0, 1, 2, 3], "failures": {"late": 1, "malformed": 1}, "bytes_up": 300}
    assert rows._per_client(row) == 100


def test_a_share_that_was_chosen_has_a_wider_interval() -> None:
    alone, chosen = share(3, 10), share(3, 10).best_of(8)
    assert chosen.low < alone.low and chosen.high > alone.high
    assert chosen.confidence == alone.confidence


def test_accuracy_over_test_sets_is_as_sure_as_of_the_smallest() -> None:
    sizes = [UtilityOf(test_accuracy=0.6, test_examples=n, test_chance=0.5) for n in (20, 2000)]
    assert accuracy_of(sizes) == accuracy(0.6, 20, 0.5)


@pytest.mark.parametrize(("after", "diverged"), [(1.9, False), (2.5, True), ("inf", True)])
def test_local_training_diverges_where_its_loss_more_than_doubles(
    after: Any, diverged: bool
) -> None:
    assert UtilityOf(local_losses=(1.0, after)).diverged is diverged


def test_a_pooled_claim_is_the_weakest_and_a_pooled_bound_the_largest(tmp_path: Path) -> None:
    lines = [line(12.0, trial=t) for t in range(3)]
    stated = ((1.0, 1e-6, 0.5), (3.0, 1e-5, 2.0), (2.0, 1e-4, 4.0))
    for row, (epsilon, delta, audited) in zip(lines, stated, strict=True):
        row["privacy"] |= {"epsilon": epsilon, "delta": delta, "audited_epsilon": audited}
        row["privacy"] |= {"unit": "example", "relation": "zero_out", "accountant": "exact"}
    row = one_line(tmp_path, lines)
    assert (row.epsilon, row.delta, row.audited_epsilon) == (3.0, 1e-4, 4.0)


def test_a_limit_of_membership_is_stated_where_presence_is_claimed() -> None:
    claim = PrivacyClaim(
        epsilon=1.0, delta=1e-5, accountant="exact", unit="example", relation="zero_out",
        reason=None,
    )  # fmt: skip
    for relation in ("zero_out", "close"):
        limits = rows._membership_limits(replace(claim, relation=relation))  # type: ignore[arg-type]
        assert set(limits.values()) == {None}
    stated = rows._membership_limits(replace(claim, relation="add_or_remove"))["membership_auc"]
    assert stated is not None and 0.5 < stated < 1.0


def test_certificates_and_failures_are_summed_over_all_trials(tmp_path: Path) -> None:
    lines = [line(15.0, trial=0), line(16.0, trial=1), line(None, trial=2)]
    for row, certified in zip(lines, (1, 2), strict=False):
        row["certificate"] = {"images": 4, "determined": 3, "certified": certified, "false": 1}
        row["cost"] = {"seconds": 10.0 * certified}
    row = one_line(tmp_path, lines)
    told = row.certificates
    assert told is not None
    assert (told.images, told.determined, told.certified, told.false) == (8, 6, 3, 2)
    assert (row.n, row.n_ok, row.failures) == (3, 2, {"it diverged": 1})
    assert row.seconds == pytest.approx(15.0)
