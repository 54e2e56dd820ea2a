"""A server that plants neurons only in the weights that it sends with a probe, end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_scenario

import fedsim
from fedsim.federation import refusals
from fedsim.recording.files import load_observation
from fedsim.recording.truth import load_truth
from fedsim.report.judge import judge
from fedsim.report.leaderboard import leaderboard_rows
from fedsim.report.messages import describe_control, sentence
from fedsim.scenario.resolve import resolve
from fedsim.training.workload import Workload
from fedsim.types import FedsimError

pytestmark = pytest.mark.usefixtures("attacks_here")

HEAD = {"width": 640, "planted": 512, "planted_std": 0.1}
TINY = tiny_scenario(
    seed=3,
    data__source="digits",
    model={"name": "mlp", "hidden": [24], "head": HEAD},
    training={"rounds": 2, "local": {"batch_size": 6}},
    defenses={"none": [], "noise": [{"name": "gaussian_noise", "std": 0.001}]},
    attacks=["activation_features", {"name": "best_features", "iterations": 100}],
    observe={"batch_sizes": [2], "trials": 2, "plant": True},
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("planted") / "out"
    fedsim.run(resolve(TINY), out=out)
    return out


def test_rows_say_that_the_server_planted(finished: Path) -> None:
    lines = (finished / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["server"] for line in lines} == {"planted"}
    recording = next((finished / "observations").rglob("*-b2-t0.json"))
    _, row = fedsim.attack(recording, "spectral_features")
    assert row["server"] == "planted"


def test_probes_see_planted_neurons_and_training_does_not(finished: Path) -> None:
    workload = Workload(resolve(TINY), "none")
    start, _ = workload.initial()
    rows = start["head.output.weight"][:, -512:]
    assert float(rows.std(1).min()) > 0  # trained like all others, from an ordinary start
    observation = load_observation(next((finished / "observations").rglob("*-b2-t0.json")))
    planted = observation.parameters["head.output.weight"][:, -512:]
    expected = torch.arange(1.0, 11)[:, None].expand(10, 512) / 512
    torch.testing.assert_close(planted, expected)
    assert float(observation.parameters["head.hidden.weight"][-512:].std()) == pytest.approx(
        0.1, rel=0.05
    )


def test_the_truth_holds_the_heads_inputs(finished: Path) -> None:
    path = next((finished / "observations").rglob("*-b2-t0.json"))
    observation = load_observation(path)
    truth = load_truth(finished, observation.id)
    assert truth.features is not None
    flat = (truth.images.flatten(2) - torch.tensor(observation.model.mean)[:, None]) / torch.tensor(
        observation.model.std
    )[:, None]
    weights = observation.parameters
    expected = torch.relu(flat.flatten(1) @ weights["body.1.weight"].T + weights["body.1.bias"])
    torch.testing.assert_close(truth.features, expected, rtol=1e-4, atol=1e-5)


def test_features_pass_the_positive_control_and_reach_the_verdict(finished: Path) -> None:
    rows = leaderboard_rows([finished])
    control = judge(rows).control
    assert control.status == "passed" and "span error" in describe_control(control)
    by_name = {verdict.defense: verdict for verdict in judge(rows).verdicts}
    assert by_name["none"].level == "features"
    assert by_name["noise"].strongest.attack == "best_features"
    assert "span error" in sentence(by_name["none"])
    report = (finished / "report.html").read_text()
    assert "it has chosen weights of the head (planted)" in report
    lines = (finished / "results.jsonl").read_text().splitlines()
    controls = [json.loads(line)["control"]["other_update"] for line in lines]
    assert all(control["subspace_error"] > 0.05 for control in controls)  # others' features


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "mlp"}}, "model.head.planted"),
        ({"observe": {"clients": [0], "plant": True}}, "set observe.batch_sizes"),
    ],
)
def test_nothing_to_plant_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FedsimError, match=message):
        refusals.check(Workload(resolve({**TINY, **changes}), "none"))


IMPRINTED = tiny_scenario(
    seed=3,
    data__source={"name": "faces", "size": 16},
    model={"name": "mlp", "hidden": [24], "imprint": {"bins": 64}},
    training={"rounds": 3, "local": {"batch_size": 6, "lr": 0.5}},
    attacks=["imprint"],
    observe={**TINY["observe"], "batch_sizes": [4]},
)


def test_probes_see_an_imprint_that_training_has_not_moved(tmp_path: Path) -> None:
    for plant in (True, False):
        scenario = {**IMPRINTED, "observe": {**IMPRINTED["observe"], "plant": plant}}
        start, _ = Workload(resolve(scenario), "none").initial()
        assert bool(start["imprint.output.weight"].any()) != plant
        out = tmp_path / str(plant)
        fedsim.run(resolve(scenario), out=out)
        observation = load_observation(next((out / "observations").rglob("*-b4-t0.json")))
        weight = observation.parameters["imprint.hidden.weight"]
        assert bool((weight == weight[0, 0]).all()) == plant
        rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        assert [row["status"] for row in rows] == ["ok", "ok"]
        assert all(row["model"]["parameters"]["imprint"]["bins"] == 64 for row in rows)
        assert "it has put a module into the model" in (out / "report.html").read_text()
        if plant:
            assert max(row["metrics"]["psnr"] for row in rows) > 30
