"""What the witness saw of a client's training is what attacks simulate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsim.assessment.clients import AppTraining
from fedsim.models.local import mean_gradient_factor
from fedsim.recording.witnessed import Witnessed
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
