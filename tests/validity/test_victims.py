"""Victims and guesses on the road: no image counts twice, and guessing is no leak (12, 24, 25)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins_here import Idle, registered

import fedsim
from fedsim.attacking.jobs import reconstruction_path
from fedsim.contracts.attack import AttackState
from fedsim.contracts.learner import DataSource
from fedsim.recording.files import read_tensors
from fedsim.recording.truth import load_truth
from fedsim.report.leaderboard import leaderboard_rows
from fedsim.report.row import LeaderboardRow
from fedsim.results import controls
from fedsim.results.controls import _made_of_public
from fedsim.results.record import Row, Run
from fedsim.scoring import Guesser, score
from fedsim.types import Dataset, FedsimError, GroundTruth, Reconstruction, Tensors

pytestmark = pytest.mark.usefixtures("attacks_here")

SIDE = 8


class Shades(DataSource):
    """Flat images of many shades and two classes, left or right half lit; some held twice."""

    clients: int = 24
    """Images that clients hold."""
    contents: int = 24
    """Different ones among them: with half as many, each is there twice."""

    def load(self) -> Dataset:

        def split(count: int, contents: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
            shades = offset + torch.arange(count) % contents * 200 // contents
            labels = torch.arange(count) % contents % 2
            images = torch.zeros(count, 1, SIDE, SIDE, dtype=torch.uint8)
            images[:] = shades.view(-1, 1, 1, 1)
            images[labels == 0, ..., : SIDE // 2] += 50
            images[labels == 1, ..., SIDE // 2 :] += 50
            return images, labels

        train, test = split(self.clients, self.contents, 1), split(100, 100, 0)
        return Dataset(
            name="shades",
            train_images=train[0],
            train_labels=train[1],
            test_images=test[0],
            test_labels=test[1],
            mean=(0.5,),
            std=(0.25,),
            classes=("left", "right"),
            private_statistics=(),
        )


class Blank(Idle):
    """Answers one black image, however many there are."""

    def postprocess(self, state: AttackState) -> Reconstruction:
        return Reconstruction(images=torch.zeros(1, 1, SIDE, SIDE), loss=0.0, iterations=1)


SCENARIO: dict[str, Any] = {
    "name": "victims",
    "seed": 3,
    "data": {"source": "shades", "clients": 2},
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"rounds": 1, "local": {"batch_size": 1, "lr": 0.1}},
    "defenses": {"none": [], "noise": [{"name": "gaussian_noise", "std": 0.01}]},
    "attacks": [{"name": "inverting_gradients", "iterations": 2}, "blank"],
    "observe": {"clients": [0], "batch_sizes": [1, 3], "trials": 4},
    "knowledge": {"labels": "inferred"},
}

MEMBERS = {"attacks": {"blank": Blank}, "data": {"shades": Shades}}


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    with registered(MEMBERS):
        yield


def run(out: Path, quiet: bool = True, **changed: Any) -> Run:
    return fedsim.run({**SCENARIO, **changed}, out=out, workers=1, quiet=quiet)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("victims") / "out")


def truth_of(run: Run, row: Row) -> GroundTruth:
    truth = load_truth(run.out, row["observation"])
    assert isinstance(truth, GroundTruth)
    return truth


def contents(run: Run, row: Row) -> list[bytes]:
    return [image.numpy().tobytes() for image in truth_of(run, row).images]


def cell(run: Run, size: int, stack: str = "none", attack: str = "blank") -> list[Row]:
    wanted = (size, stack, attack)
    return [
        row
        for row in run.rows()
        if (row["batch_size"], row["defense"]["name"], row["attack"]["name"]) == wanted
    ]


def line(run: Run, size: int) -> LeaderboardRow:
    (found,) = (
        row
        for row in leaderboard_rows([run.out])
        if (row.batch_size, row.defense, row.attack) == (size, "none", "blank")
    )
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_no_two_trials_attack_the_same_image(finished: Run, size: int) -> None:
    """Rule 25: of a client's 12 images, 4 trials of 3 take each one once."""
    found = [image for row in cell(finished, size) for image in contents(finished, row)]
    assert len(found) == len(set(found)) == 4 * size
    assert line(finished, size).images == 4 * size
    assert line(finished, size).n == line(finished, size).independent == 4


def test_every_stack_has_the_same_victims(finished: Run) -> None:
    for size in (1, 3):
        own = [[r["victims"] for r in cell(finished, size, s)] for s in ("none", "noise")]
        assert own[0] == own[1]
        digests = [digest for victims in own[0] for digest in victims]
        assert len(set(digests)) == len(digests) == 4 * size


@pytest.mark.parametrize(
    ("source", "observe", "reason"),
    [
        ({}, {"batch_sizes": [3], "trials": 5}, r"5 trials of 3 images need 15 .* lower it"),
        (
            {"clients": 2, "contents": 2},
            {"batch_sizes": [1], "trials": 6},
            "holds 1: lower it to 1",
        ),
        (
            {"clients": 24, "contents": 1},
            {"batch_sizes": [1], "trials": 2},
            "need 2 different ones, and client 0 holds 1",
        ),
    ],
)
def test_more_trials_than_images_are_refused(
    source: dict[str, int], observe: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Rule 25: before any work; images that are there twice count once."""
    data = {"source": {"name": "shades", **source}, "clients": 2}
    with pytest.raises(FedsimError, match=f"observe.trials: .*{reason}"):
        run(tmp_path / "out", data=data, observe={"clients": [0], **observe})
    assert not (tmp_path / "out").exists()


def test_several_steps_take_images_of_their_own(tmp_path: Path) -> None:
    """Rule 25: over the steps of all trials, too."""
    training = {
        "rounds": 1,
        "algorithm": "fedavg",
        "local": {"batch_size": 1, "lr": 0.1, "steps": 2},
    }
    observe = {"clients": [0], "batch_sizes": [2], "trials": 3}
    done = run(tmp_path / "out", training=training, observe=observe, attacks=["blank"])
    found = [image for row in cell(done, 2) for image in contents(done, row)]
    assert len(found) == len(set(found)) == 12
    with pytest.raises(FedsimError, match="4 trials of 4 images need 16"):
        run(tmp_path / "more", training=training, observe={**observe, "trials": 4})


def test_another_update_is_of_other_images(tmp_path: Path) -> None:
    """Rule 25: by content, and null if there is none. Clients may hold the same images."""
    data = {"source": {"name": "shades", "clients": 2, "contents": 1}, "clients": 2}
    observe = {"clients": "all", "batch_sizes": [1], "trials": 1}
    same = run(tmp_path / "same", data=data, observe=observe, attacks=["blank"])
    assert len(cell(same, 1)) == 2
    assert all(row["control"]["other_update"] is None for row in cell(same, 1))
    found = line(same, 1)
    assert (found.n, found.images, found.independent) == (2, 1, 1)
    assert "psnr" not in found.others

    data["source"] = {"name": "shades", "clients": 2, "contents": 2}
    apart = run(tmp_path / "apart", data=data, observe=observe, attacks=["blank"])
    assert all(row["control"]["other_update"] is not None for row in cell(apart, 1))
    assert (line(apart, 1).images, line(apart, 1).independent) == (2, 2)


def test_where_no_other_client_is_observed_the_control_is_of_public_images(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rule 12: never the same client's next batch, whose look-alikes would hide a leak."""
    observe = {"clients": [0], "batch_sizes": [3], "trials": 2}
    attacks = [{"name": "inverting_gradients", "iterations": 2}, "label_inference"]
    done = run(
        tmp_path / "out", observe=observe, attacks=attacks, defenses={"none": []}, quiet=False
    )
    assert "control: 2 of 2 to do" in capfd.readouterr().err, "controls may take as long"
    assert {row["control"]["of"] for row in done.rows()} == {"public"}
    rows = cell(done, 3, attack="inverting_gradients")
    path = _made_of_public(rows, done.out)
    assert path is not None
    drawn, source = read_tensors(path), Shades().load()
    public = [image.float() / 255 for image in source.test_images]
    assert all(any(torch.equal(image, one) for one in public) for image in drawn["truth"])
    for row in rows:
        found = Reconstruction(
            images=drawn["reconstruction"], labels=drawn["labels"], loss=0.0, iterations=1
        )
        scores, control = score(found, truth_of(done, row)), row["control"]
        assert control["other_update"]["psnr"] == pytest.approx(scores["psnr"])
        assert control["per_image"]["psnr"] == pytest.approx(scores.per_image["psnr"])
    alone = observe | {"trials": 1}
    one = run(tmp_path / "one", observe=alone, attacks=attacks, defenses={"none": []})
    assert {row["control"]["of"] for row in one.rows()} == {"public"}


def test_seeds_of_few_images_are_no_independent_trials(tmp_path: Path) -> None:
    """Rule 25: the interval is of images, whatever runs they are spread over."""
    data = {"source": {"name": "shades", "clients": 2, "contents": 2}, "clients": 1}
    observe = {"clients": [0], "batch_sizes": [1], "trials": 2}
    for seed in (1, 2, 3):
        done = run(
            tmp_path / "all" / str(seed), seed=seed, data=data, observe=observe, attacks=["blank"]
        )
    (found,) = (row for row in leaderboard_rows([done.out.parent]) if row.defense == "none")
    assert (found.n, found.images, found.independent) == (6, 2, 2)
    assert found.gain is not None and found.gain.n == 2 and found.gain.low is None


def test_the_guess_is_matched_as_generously_as_an_attack(finished: Run) -> None:
    """Rule 24: as many different images as there are truths, each matched to one."""
    source = Shades().load()
    guesser = Guesser(source.test_images, source.test_labels)
    gains = []
    for row in cell(finished, 3):
        truth = truth_of(finished, row).images
        error = (guesser.mean - truth).square().flatten(1).mean(1)
        gains.append(row["baseline"]["psnr"] - float((-10 * error.log10()).mean()))
        assert row["baseline"]["name"] == guesser(3).name != "mean_image"
    assert sum(gains) / len(gains) > 2, "shades that are evenly spaced, for the mean of all"


def test_the_guess_knows_granted_labels(finished: Run, tmp_path: Path) -> None:
    """Rule 24: where labels are handed to attacks, they are to the guess; inferred, they are not.

    Half of an image is lit, and the label says which.
    """
    known = run(tmp_path / "out", knowledge={"labels": "known"}, attacks=["blank"])
    for size in (1, 3):
        for row, untold in zip(cell(known, size), cell(finished, size), strict=True):
            assert row["victims"] == untold["victims"]
            assert "class" in row["baseline"]["name"] and "class" not in untold["baseline"]["name"]
    told = [row["baseline"]["psnr"] for row in cell(known, 3)]
    untold_psnr = [row["baseline"]["psnr"] for row in cell(finished, 3)]
    assert sum(told) > sum(untold_psnr) + 1
    assert all(row["baseline"]["label_accuracy"] == 1.0 for row in cell(known, 1))


def test_labels_alone_are_guessed_as_they_are_scored(tmp_path: Path) -> None:
    """Rule 24: as a multiset. With two even classes, one of each is the best guess of two."""
    observe = {"clients": [0], "batch_sizes": [2], "trials": 4}
    done = run(tmp_path / "out", attacks=["label_inference"], observe=observe)
    for row in cell(done, 2, attack="label_inference"):
        both = len(set(truth_of(done, row).labels.tolist())) == 2
        assert row["baseline"]["name"] == "labels" and row["baseline"]["psnr"] is None
        assert row["baseline"]["label_accuracy"] == (1.0 if both else 0.5)


def test_what_an_attack_leaves_out_is_the_mean_image(finished: Run) -> None:
    """Rule 11: one for all, so that leaving out is no better than the guess."""
    source = Shades().load()
    mean = Guesser(source.test_images, source.test_labels).mean
    for row in cell(finished, 3):
        path = reconstruction_path(finished.out, "blank", row["observation"])
        saved: Tensors = read_tensors(path)
        filled = [torch.equal(image, mean) for image in saved["reconstruction"]]
        assert sorted(filled) == [False, True, True]
        error = (saved["reconstruction"] - saved["truth"]).double().square().flatten(1).mean(1)
        assert row["metrics"]["psnr"] == pytest.approx(float((-10 * error.log10()).mean()))
    assert sum(row["metrics"]["psnr"] - row["baseline"]["psnr"] for row in cell(finished, 3)) < 0


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (["a", "b"], ["c", "d"], [0, 1]),
        (["a", "b", "c"], ["a", "d"], [1, 1, 0]),
        (["a"], ["a"], None),
        ([], ["a"], None),
        (["a"], [], None),
    ],
)
def test_a_row_is_never_compared_with_what_was_made_of_it(
    own: list[str], other: list[str], expected: list[int] | None
) -> None:
    """Rule 25, of releases of a table, which share rows."""
    assert controls._other_targets(own, other) == expected
