"""What an assessment takes from a client's training, and the command that repeats it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fedsim.assessment.assess import AssessSettings, _classes_of, _command_of
from fedsim.assessment.clients import AppTraining
from fedsim.contracts.grant import Grant
from fedsim.models.local import mean_gradient_factor
from fedsim.recording.witnessed import Witnessed
from fedsim.scenario import grant_of
from fedsim.types import FedsimError, LocalTraining


def simulated(rates: list[float], images: int, *defenses: dict[str, object]) -> LocalTraining:
    said = Witnessed(
        run_id=1,
        round=1,
        node_id=1,
        message_id="1",
        partition=None,
        images=images,
        left_out=0,
        sizes=[2] * len(rates),
        optimizer="SGD",
        settings={"lr": rates[0]},
        training_mode=True,
        rates=rates,
        factors=[1.0] * len(rates),
    )
    each: Any = SimpleNamespace(testimony=SimpleNamespace(said=said, path=Path("witnessed")))
    app = AppTraining(answer="weights", local=None, mode="train", defenses=defenses, notes=[])
    return app.training(each)


def test_a_rate_that_rises_from_zero_is_simulated() -> None:
    training = simulated([0.0, 0.1, 0.2], images=6)
    assert training.lr > 0 and training.rule is not None
    assert training.rule.rates == (0.0, 0.1, 0.2)
    assert mean_gradient_factor(training) == pytest.approx(-1 / 0.3)


def test_an_epoch_whose_rates_are_zero_is_one_of_the_same_weight() -> None:
    training = simulated([0.0, 0.0, 0.1, 0.2], images=4)
    assert mean_gradient_factor(training) == pytest.approx(-1 / 0.3)


def test_a_client_that_learns_nothing_is_refused() -> None:
    with pytest.raises(FedsimError, match="learning rates"):
        simulated([0.0, 0.0], images=4)


def test_what_no_witness_sees_of_the_training_is_read_off_a_declared_defense() -> None:
    dropout, steps = {"name": "dropout", "rate": 0.5}, {"name": "local_aggregation", "steps": 9}
    declared = simulated([0.1, 0.1], 4, dropout, steps)
    assert declared == replace(simulated([0.1, 0.1], 4), dropout=0.5)


def test_the_command_grants_what_was_granted(tmp_path: Path) -> None:
    grant = Grant(labels="known", public="test")
    words = shlex.split(_command_of(tmp_path, "app:Net", [], AssessSettings(grant=grant)))
    stated = [words[place + 1] for place, word in enumerate(words) if word == "--grant"]
    assert grant_of(stated) == grant


def test_a_trial_leaves_each_module_in_its_mode() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 5)).train()
    model[1].eval()
    assert _classes_of(model, (3, 2, 2)) == 5
    assert [part.training for part in model] == [True, False, True]
