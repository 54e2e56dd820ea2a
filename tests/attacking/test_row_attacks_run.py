"""Attacks on releases in a whole run: from a scenario over a table to leaderboard and report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim
from fedsim.federation import refusals
from fedsim.privacy.membership import auc_limit
from fedsim.recording.truth import load_truth
from fedsim.report import leaderboard_rows, positive_controls, render
from fedsim.report.messages import describe_control
from fedsim.results.record import Row, Run
from fedsim.scenario import ScenarioError
from fedsim.scenario.resolve import resolve
from fedsim.training.schedule import Probe
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, RowTruth

pytestmark = pytest.mark.usefixtures("attacks_here")

NOISE = {"name": "random_projection", "epsilon": 1.0, "delta": 1e-3}
SCENARIO: dict[str, Any] = {
    "name": "rows",
    "seed": 5,
    "data": {"source": "breast_cancer", "clients": 3},
    "learner": {"name": "least_squares", "columns": 60},
    "training": {"rounds": 1},
    "defenses": {"none": [], "noise": [NOISE], "sum": [{**NOISE, "shared_among": 3}, "aggregate"]},
    "attacks": [
        {"name": "row_reconstruction", "iterations": 20, "starts": 1, "samples": 50},
        "membership_inference",
    ],
    "observe": {"batch_sizes": [8], "trials": 2},
    "knowledge": {"rows": "others"},
    "privacy": {"delta": 1e-3},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """On a table of 60 patients, 48 of them for training."""
    folder = tmp_path_factory.mktemp("run")
    stream = torch.Generator().manual_seed(0)
    values = torch.rand(60, 3, generator=stream).round(decimals=3)
    lines = ["age,dose,response", *(",".join(map(str, row)) for row in values.tolist())]
    (folder / "patients.csv").write_text("\n".join(lines) + "\n")
    column = {"low": 0, "high": 1}
    source = {
        "name": "table",
        "path": str(folder / "patients.csv"),
        "features": [{"name": "age", **column}, {"name": "dose", **column}],
        "target": {"name": "response", **column},
    }
    wanted = {**SCENARIO, "data": {"source": source, "clients": 3}}
    return fedsim.run(wanted, out=folder / "out", workers=1)


def rows_of(run: Run, stack: str, attack: str) -> list[Row]:
    return [
        row
        for row in run.rows()
        if (row["defense"]["name"], row["attack"]["name"]) == (stack, attack)
    ]


def test_attacks_work_if_either_rows_or_members_are_told(finished: Run) -> None:
    """A release that is random by itself may tell who is in it, and little else."""
    rows = leaderboard_rows([finished.out])

    def with_means(gain: float, area: float) -> str:
        changed = []
        for row in rows:
            told = row.metrics["membership_auc"]
            metrics = {**row.metrics, "membership_auc": told and replace(told, mean=area)}
            parts = {
                part: {**held, "psnr": replace(held["psnr"], mean=gain)}
                for part, held in (("gains", row.gains), ("own_gains", row.own_gains))
                if "psnr" in held
            }
            changed.append(replace(row, metrics=metrics, **parts))
        (control,) = positive_controls(changed)
        return f"{control.status}: {describe_control(control)}"

    assert "passed: undefended, at batch size 8, row_reconstruction" in with_means(5.0, 0.5)
    assert "passed: undefended, at batch size 8, membership_inference" in with_means(1.0, 0.8)
    assert "failed: undefended, at batch size 8, row_reconstruction" in with_means(1.0, 0.7)


def test_undefended_rows_leak_and_noise_helps(finished: Run) -> None:
    def mean(stack: str, attack: str, metric: str) -> float:
        values = [row["metrics"][metric] for row in rows_of(finished, stack, attack)]
        return sum(values) / len(values)

    assert mean("none", "membership_inference", "membership_auc") > 0.95
    assert mean("noise", "membership_inference", "membership_auc") < 0.75
    errors = [mean(s, "row_reconstruction", "row_error") for s in ("none", "noise")]
    assert errors[0] < 0.7 * errors[1]


def test_each_row_takes_part_by_itself_with_the_declared_chance() -> None:
    """Independently of the others: the number of rows varies as a binomial does."""
    wanted = {**SCENARIO, "learner": {"name": "sketch", "columns": 2}, "defenses": {"none": []}}
    workload = Workload(resolve(wanted), "none")
    parameters, buffers = workload.computation.initial()
    drawn = []
    for trial in range(200):
        probe = Probe(batch_size=40, trial=trial)
        truth = workload.client_update(0, 1, parameters, buffers, {}, probe=probe).truth
        assert isinstance(truth, RowTruth)
        drawn.append(truth.members)
    members = torch.stack(drawn).double()
    chance = 40 / members.shape[1]
    deviation = (chance * (1 - chance) / members.numel()) ** 0.5
    assert float(members.mean()) == pytest.approx(chance, abs=4 * deviation)
    spread = float(members.sum(1).var()) / (members.shape[1] * chance * (1 - chance))
    assert 0.6 < spread < 1.5  # χ² of 199 degrees: 0.6 and 1.5 are 4 and 5 deviations away


def test_membership_stands_beside_what_the_claim_allows(finished: Run) -> None:
    for stack in SCENARIO["defenses"]:
        for row in rows_of(finished, stack, "membership_inference"):
            limit = row["theory"]["membership_auc"]
            if stack == "none":
                assert limit is None
            else:
                epsilon = row["privacy"]["epsilon"]
                assert limit == auc_limit(epsilon, 1e-3) and 0.7 < limit < 0.75


@pytest.mark.slow
def test_kernel_regressions_are_attacked_in_a_whole_run(tmp_path: Path) -> None:
    """Without noise all is told. Behind it ε is below 1, and members are told all the same."""
    far = [
        {"name": "gaussian_sampling", "beta": 0.01, "lift": 3, "samples": 199},
        {"name": "truncated_laplace", "beta": 0.01, "epsilon": 0.7, "delta": 4e-4},
    ]
    wanted = {
        **SCENARIO,
        "data": {"source": {"name": "digits", "size": 8}, "clients": 8},
        "learner": {"name": "ntk", "ridge": 1.0},
        "defenses": {"none": [], "far": far},
        "attacks": [{"name": "row_reconstruction", "samples": 20}, "membership_inference"],
        "observe": {"batch_sizes": [8], "trials": 2, "clients": [0]},
    }
    run = fedsim.run(wanted, out=tmp_path / "out", workers=1)
    (control,) = positive_controls(leaderboard_rows([run.out]))
    assert control.status == "passed" and len(run.rows()) == 8
    ((told, _), (noisy, _)) = (rows_of(run, s, "row_reconstruction") for s in wanted["defenses"])
    assert told["metrics"]["rows_recovered"] == told["metrics"]["label_accuracy"] == 1
    assert told["baseline"]["rows_recovered"] < 0.2 > told["metrics"]["row_error"]
    assert told["control"]["other_update"]["row_error"] > 0.3
    assert 0.01 < noisy["metrics"]["row_error"] < noisy["baseline"]["row_error"]
    ((told, _), (noisy, _)) = (rows_of(run, s, "membership_inference") for s in wanted["defenses"])
    assert told["metrics"]["membership_auc"] == 1 and noisy["metrics"]["membership_auc"] > 0.9
    assert noisy["privacy"]["relation"] == "close" and 0 < noisy["privacy"]["epsilon"] < 1
    assert noisy["theory"]["membership_auc"] is noisy["theory"]["membership_tpr"] is None
    path = next(p for p in run.observations() if "/far/" in str(p))
    seen = fedsim.load_observation(path)
    assert seen.release.statistics["features"]["scale"] == pytest.approx(0.0487, rel=0.01)
    truth = load_truth(run.out, seen.id)
    assert isinstance(truth, RowTruth)
    assert truth.scored.tolist() == [True] * 64 + [False] * 10


def test_the_truth_says_who_took_part(finished: Run) -> None:
    truth = load_truth(finished.out, "none/round-0001/client-0000-b8-t0")
    both = load_truth(finished.out, "sum/round-0001/aggregate-b8-t0")
    assert isinstance(truth, RowTruth) and isinstance(both, RowTruth)
    assert 0 < int(truth.members.sum()) < len(truth.members)
    assert both.clients.unique().tolist() == [0, 1, 2]
    assert truth.scored.tolist() == [True, True, False, True]
    # The same rows take part whatever the defense, and others in another trial.
    assert torch.equal(both.members[both.clients == 0], truth.members)
    again = load_truth(finished.out, "none/round-0001/client-0000-b8-t1")
    assert isinstance(again, RowTruth) and not torch.equal(again.members, truth.members)


def test_no_row_is_in_what_the_server_saw(finished: Run) -> None:
    """A recording holds the release and what is public; the training release is not recorded."""
    paths = finished.observations()
    assert len(paths) == 3 * 2
    for path in paths:
        seen = fedsim.load_observation(path)
        assert set(seen.update) == {"release"} and seen.update["release"].shape == (4, 60)
        text = path.read_text()
        assert '"model": null' in text and '"sigma"' in text and "members" not in text
        assert (seen.release.sigma > 0) == ("/none/" not in str(path))
        with pytest.raises(FedsimError, match="of no model"):
            _ = seen.model


def test_control_leaderboard_and_report(finished: Run) -> None:
    lines = leaderboard_rows([finished.out])
    assert {line.subject for line in lines} == {"rows"} and lines[0].model == "least_squares"
    text = render(lines, width=200)
    assert "AUC" in text and "rows others" in text and "INVALID" not in text
    document = json.loads(render(lines, "json"))
    assert document["rows"][0]["membership_gain"] or document["rows"][0]["gain"]
    page = (finished.out / "report.html").read_text()
    assert "Who took part" in page
    assert "informed adversary" in page
    assert 'id="tip-ssim"' not in page, "a table has no metric of images"
    for row in finished.rows():
        assert row["control"]["other_update"] is not None
    others = [
        row["control"]["other_update"]["membership_auc"]
        for row in rows_of(finished, "none", "membership_inference")
    ]
    assert all(abs(value - 0.5) < 0.35 for value in others)


def test_a_recording_is_replayed(finished: Run) -> None:
    path = next(p for p in finished.observations() if "none/round-0001/client-0000-b8-t0" in str(p))
    found, row = fedsim.attack(path, "membership_inference", grant=fedsim.Grant(rows="others"))
    (recorded,) = [r for r in rows_of(finished, "none", "membership_inference") if r["trial"] == 0]
    assert found.membership is not None
    assert row["metrics"]["membership_auc"] == recorded["metrics"]["membership_auc"]
    with pytest.raises(FedsimError, match=r"knowledge\.rows: others"):
        fedsim.attack(path, "membership_inference")
    with pytest.raises(FedsimError, match="reads updates of a model"):
        fedsim.attack(path, "idlg")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attacks": ["idlg"]}, "attacks.*idlg reads updates.*kind sketch.*membership_inference"),
        (
            {"learner": "sgd", "model": "mlp", "defenses": {"none": []}, "training": {}},
            "row_reconstruction reads sketch.*send updates of a model; drop it, or use one that "
            "does .*deep_leakage",
        ),
        ({"observe": {}}, "observe.batch_sizes: missing"),
        ({"observe": {"batch_sizes": [8], "releases": 2}}, "observe.releases: .* drawn anew"),
        ({"observe": {"batch_sizes": [8], "plant": True}}, "observe.plant: .* no model to plant"),
        ({"knowledge": {}}, "needs knowledge.rows: others"),
    ],
)
def test_what_a_scenario_cannot_mean(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        resolve({**SCENARIO, **changes})


def test_more_rows_than_a_client_has_are_refused() -> None:
    wanted = resolve({**SCENARIO, "observe": {"batch_sizes": [1000]}})
    with pytest.raises(FedsimError, match=r"observe\.batch_sizes: .* rows"):
        refusals.check(Workload(wanted, "none"))
