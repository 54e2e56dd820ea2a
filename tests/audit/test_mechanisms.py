"""Every mechanism's claim tried, honest and with less noise; the command that does it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsim.audit.mechanisms import audit
from fedsim.cli.privacy import app

STEPS = {"steps": 3, "sampling_rate": 0.5, "correlation": 0.5, "noise_multiplier": 1.5}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gaussian", {"sensitivity": 2.0, "sigma": 2.0}),
    ("random_projection", {"leverage": 0.1, "r": 20}),
    ("least_squares", {"p": 0.05, "q": 0.1, "r": 100, "d": 10}),
    ("truncated_laplace", {"scale": 1.0, "bound": 4.5}),
    ("gaussian_sampling", {"k": 100, "distance": 0.15}),
    ("gaussian_sampling", {"k": 100, "beta": 0.05, "lift": 1.0}),
    ("poisson_gaussian", {"steps": 4, "sampling_rate": 0.5, "noise_multiplier": 1.0}),
    ("correlated_gaussian", {**STEPS, "sampling": "full"}),
    ("correlated_gaussian", {**STEPS, "sampling": "single_epoch", "noise_multiplier": 0.8}),
    ("correlated_gaussian", {**STEPS, "sampling": "fixed_size"}),
]
DELTA, DRAWS = 0.02, 150_000


@pytest.mark.parametrize(("mechanism", "keys"), CASES)
def test_an_honest_mechanism_holds_and_one_with_half_the_noise_is_caught(
    mechanism: str, keys: dict[str, Any]
) -> None:
    honest = audit(mechanism, keys, delta=DELTA, draws=DRAWS)
    assert honest.holds
    assert 0.5 * honest.claim < honest.lower_bound <= honest.claim
    lying = audit(mechanism, {**keys, "sabotage": 0.5}, delta=DELTA, draws=DRAWS)
    assert lying.claim == honest.claim
    assert not lying.holds


def test_a_gaussian_with_a_fifth_less_noise_is_caught() -> None:
    keys = {"sensitivity": 1.0, "sigma": 1.0, "sabotage": 0.8}
    assert not audit("gaussian", keys, delta=1e-5).holds


@pytest.mark.parametrize(
    ("mechanism", "keys"),
    [
        ("gaussian", {"sensitivity": 1.0, "sigma": 4.0}),
        ("random_projection", {"leverage": 0.02, "r": 20}),
        ("poisson_gaussian", {"steps": 4, "sampling_rate": 0.5, "noise_multiplier": 4.0}),
    ],
)
def test_one_run_of_a_thousand_rows_bears_the_claim_and_catches_a_tenth_of_the_noise(
    mechanism: str, keys: dict[str, Any]
) -> None:
    honest = audit(mechanism, keys, delta=1e-5, draws=1000, method="one_run")
    assert honest.holds
    assert list(honest.bounds) == ["one_run"]
    lying = audit(mechanism, {**keys, "sabotage": 0.1}, delta=1e-5, draws=1000, method="one_run")
    assert not lying.holds
    assert lying.lower_bound < math.log(1000 / 4.6)


def test_the_command_says_what_was_found() -> None:
    words = ["audit", "gaussian", "sensitivity=1", "sigma=1", "--delta", "0.01"]
    done = CliRunner().invoke(app, [*words, "--draws", "20000", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said["holds"] is True and said["verdict"] == "holds"
    assert 0 < said["lower_bound"] < said["claim"]
    assert (said["draws"], said["delta"], said["confidence"]) == (20000, 0.01, 0.99)


def test_a_refuted_claim_is_exit_status_1() -> None:
    words = ["audit", "gaussian", "sensitivity=1", "sigma=1", "sabotage=0.5", "--delta", "0.01"]
    done = CliRunner().invoke(app, [*words, "--draws", "20000"])
    assert done.exit_code == 1
    assert "REFUTED: the mechanism leaks more than it claims" in done.output
