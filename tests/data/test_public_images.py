"""Public images from a scenario to its attacks: granted, recorded, replayed; and of no client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_scenario
from typer.testing import CliRunner

import fedsim
from fedsim.cli.commands import app
from fedsim.data.bundled import Digits
from fedsim.data.images import public_examples
from fedsim.recording.files import load_public, save_public
from fedsim.recording.truth import load_truth
from fedsim.report import leaderboard_rows
from fedsim.report.threat import threat_model
from fedsim.results.reading import load_runs
from fedsim.results.record import Run
from fedsim.types import Dataset, FedsimError, GroundTruth

pytestmark = pytest.mark.usefixtures("attacks_here")

HEAD = {"width": 640, "planted": 512, "planted_std": 0.3, "planted_gain": 0.1}
SCENARIO = tiny_scenario(
    seed=5,
    data={"source": {"name": "digits", "size": 12}, "clients": 3},
    model={"name": "mlp", "hidden": [32], "head": HEAD},
    training__rounds=3,
    attacks=["feature_regression"],
    observe={"batch_sizes": [2]},
    knowledge={"public": "test"},
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fedsim.run(SCENARIO, out=tmp_path_factory.mktemp("run") / "out", workers=1)


def test_they_are_the_test_split_and_hold_no_victim(finished: Run) -> None:
    data = Digits(size=12).load()
    images = load_public(finished.out)
    assert torch.equal(images, data.test_images)
    (path,) = finished.observations()
    truth = load_truth(finished.out, fedsim.load_observation(path).id)
    assert isinstance(truth, GroundTruth)
    for victim in (truth.images * 255).round().byte():
        assert not (images == victim).flatten(1).all(1).any()


def test_the_row_says_so_and_the_attack_gains(finished: Run) -> None:
    (row,) = finished.rows()
    assert row["status"] == "ok", row["reason"]
    assert row["knowledge"]["public"] == "test"
    assert row["metrics"]["psnr"] > row["baseline"]["psnr"] + 2
    (cell,) = leaderboard_rows([finished.out])
    assert cell.knowledge.public == "test"
    granted = dict(threat_model(load_runs([finished.out])[0].rows))["Is granted"]
    assert "the test split" in granted


def test_a_recording_is_attacked_with_them_again(finished: Run, tmp_path: Path) -> None:
    (path,) = finished.observations()
    (recorded,) = finished.rows()
    _, row = fedsim.attack(path, "feature_regression", grant=fedsim.Grant(public="test"))
    assert row["knowledge"]["public"] == "test"
    assert row["metrics"] == pytest.approx(recorded["metrics"], nan_ok=True)
    words = ["attack", str(path), "--attack", "feature_regression", "--quiet"]
    result = CliRunner().invoke(app, [*words, "--grant", "public=test"])
    assert json.loads(result.stdout)["metrics"]["psnr"] == pytest.approx(row["metrics"]["psnr"])
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "--grant public=test" in refused.stderr
    alone = fedsim.load_observation(path)
    with pytest.raises(FedsimError, match="--truth"):
        fedsim.attack(alone, "feature_regression", grant=fedsim.Grant(public="test"))


def test_what_was_not_granted_was_not_recorded(tmp_path: Path) -> None:
    attacks = ["label_inference"]
    done = fedsim.run({**SCENARIO, "knowledge": {}, "attacks": attacks}, out=tmp_path / "out")
    assert not list(done.out.glob("public*"))
    with pytest.raises(FedsimError, match=r"knowledge\.public: test"):
        fedsim.attack(
            done.observations()[0], "feature_regression", grant=fedsim.Grant(public="test")
        )


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    save_public(torch.zeros(2, 3, 4), tmp_path)
    with pytest.raises(FedsimError, match="not the public images"):
        load_public(tmp_path)


def test_of_many_images_ten_thousand_are_drawn_by_the_seed() -> None:
    count = 10_050
    images = torch.arange(count).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    data = Dataset(
        name="counted",
        train_images=images[:1],
        train_labels=torch.zeros(1, dtype=torch.int64),
        test_images=images,
        test_labels=torch.zeros(count, dtype=torch.int64),
        mean=(0.0,),
        std=(1.0,),
        classes=("one",),
    )
    drawn = public_examples(data, seed=1)[0]
    assert len(drawn) == 10_000
    assert len(drawn[:, 0, 0, 0].unique()) == 10_000
    assert torch.equal(drawn, public_examples(data, seed=1)[0])
    assert not torch.equal(drawn, public_examples(data, seed=2)[0])
