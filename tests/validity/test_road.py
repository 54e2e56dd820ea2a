"""The honesty rules on the road itself: one run, from the scenario to its rows, files and report.

Tests of the parts pass while the road between them is broken. Here nothing is called but
`fedsim.run`; what it wrote is compared with what the test computes on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from plugins_here import registered
from torch import Tensor, nn
from torch.func import functional_call

import fedsim
from fedsim.attacking.jobs import reconstruction_path, seed_of
from fedsim.attacking.knowledge import hand_over
from fedsim.contracts.attack import Attack, AttackState, solve
from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.contracts.guarantee import Guarantee
from fedsim.contracts.learner import DataSource
from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.recording.files import load_observation, read_tensors
from fedsim.recording.truth import load_truth
from fedsim.report import leaderboard_rows, positive_controls
from fedsim.report.messages import describe_control
from fedsim.results.record import Row, Run
from fedsim.targets.labels import _label_overlap
from fedsim.types import Dataset, GroundTruth, Observation, Reconstruction, Tensors

pytestmark = pytest.mark.usefixtures("attacks_here")

RESTARTS = 4
SPREAD = 8
"""Images differ from their split's brightness by at most so many of 255 steps."""


class Lamps(DataSource):
    """Clients hold bright noise, the test split is dark: what is made of which shows."""

    clients: int = 200
    test: int = 40
    bright: int = 220
    dark: int = 40

    def load(self) -> Dataset:
        stream = torch.Generator().manual_seed(5)

        def split(count: int, brightness: int) -> Tensor:
            noise = torch.randint(-SPREAD, SPREAD + 1, (count, 1, 12, 12), generator=stream)
            return (noise + brightness).to(torch.uint8)

        def labels(count: int) -> Tensor:
            return torch.randint(0, 3, (count,), generator=stream)

        return Dataset(
            name="lamps",
            train_images=split(self.clients, self.bright),
            train_labels=labels(self.clients),
            test_images=split(self.test, self.dark),
            test_labels=labels(self.test),
            mean=(0.5,),
            std=(0.25,),
            classes=("a", "b", "c"),
            private_statistics=(),
        )


@dataclass(kw_only=True)
class Drawn(AttackState):
    """What one restart of `dice` has drawn."""

    images: Tensor
    labels: Tensor


class Dice(Attack[Drawn]):
    """Draws its pixels and its own loss: only a choice by that loss gives the reported picture."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Drawn:
        shape = (observation.num_images, *observation.model.input_shape)
        loss = torch.rand((), generator=rng)
        brightness = torch.rand((), generator=rng)
        images = (0.1 * torch.rand(shape, generator=rng) + 0.9 * brightness).clamp(0, 1)
        labels = torch.randint(0, 3, (observation.num_images,), generator=rng)
        return Drawn(loss=loss, images=images, labels=labels)

    def step(self, state: Drawn) -> Drawn:
        state.iteration += 1
        return state

    def terminate(self, state: Drawn) -> bool:
        return state.iteration > 0

    def postprocess(self, state: Drawn) -> Reconstruction:
        return Reconstruction(
            images=state.images, labels=state.labels, loss=float(state.loss), iterations=1
        )


class Witness(Dice):
    """Reports as its loss what it was handed, one bit each."""

    BITS: ClassVar[Mapping[str, int]] = {
        "true_labels": 1,
        "exact_bn": 2,
        "true_features": 4,
        "public_images": 8,
        "buffers_update": 16,
    }

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Drawn:
        handed = {
            "true_labels": knowledge.true_labels is not None,
            "exact_bn": knowledge.exact_bn is not None,
            "true_features": knowledge.true_features is not None,
            "public_images": knowledge.public_images is not None,
            "buffers_update": bool(observation.buffers_update),
        }
        state = super().init(observation, knowledge, rng)
        state.loss = torch.tensor(float(sum(self.BITS[name] for name in handed if handed[name])))
        return state


class Half(Dice):
    """Answers the first of its images alone."""

    def postprocess(self, state: Drawn) -> Reconstruction:
        found = super().postprocess(state)
        assert found.images is not None and found.labels is not None
        return replace(found, images=found.images[:1], labels=found.labels[:1])


class Dreams(Dice):
    """Answers features of noise under the public weights, and reads nothing off the update."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Drawn:
        state = super().init(observation, knowledge, rng)
        model = rebuild(observation).eval()
        with torch.no_grad():
            state.labels = model.features(normalize(state.images, observation.model))
        return state

    def postprocess(self, state: Drawn) -> Reconstruction:
        return Reconstruction(features=state.labels, loss=0.0, iterations=1)


class Breaks(UpdateDefense):
    """Fails in every second call: the first one is the check before training."""

    calls: ClassVar[list[int]] = []

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        return {}

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        self.calls.append(1)
        if len(self.calls) % 2 == 0:
            raise RuntimeError("out of battery")
        return update, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        return before.unproven("it breaks")


SCENARIO: dict[str, Any] = {
    "name": "road",
    "seed": 11,
    "data": {"source": "lamps", "clients": 2},
    "model": {"name": "convnet", "width": 2, "norm": "batch", "head": {"width": 8, "planted": 4}},
    "training": {"rounds": 2, "local": {"batch_size": 4, "lr": 0.1}},
    "defenses": {"none": [], "breaks": ["breaks"], "sum": ["aggregate"]},
    "attacks": [{"name": "dice", "restarts": RESTARTS}, "witness"],
    "observe": {"rounds": [1, "last"], "clients": "all", "batch_sizes": [3], "trials": 3},
    "knowledge": {"labels": "inferred", "bn": "running"},
}

MEMBERS = {
    "attacks": {"dice": Dice, "dreams": Dreams, "half": Half, "witness": Witness},
    "defenses": {"breaks": Breaks},
    "data": {"lamps": Lamps},
}


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    with registered(MEMBERS):
        yield


@pytest.fixture(scope="module")
def finished(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    Breaks.calls.clear()
    return fedsim.run(SCENARIO, out=tmp_path_factory.mktemp("road") / "out", workers=1)


def of(run: Run, attack: str, *stacks: str, status: str = "ok") -> list[Row]:
    rows = [
        row
        for row in run.rows()
        if row["attack"]["name"] == attack
        and row["defense"]["name"] in stacks
        and row["status"] == status
    ]
    assert rows, "nothing to look at"
    return rows


def recorded(run: Run, row: Row) -> Observation:
    return load_observation(run.out / "observations" / f"{row['observation']}.json")


def truth_of(run: Run, row: Row) -> GroundTruth:
    truth = load_truth(run.out, row["observation"])
    assert isinstance(truth, GroundTruth)
    return truth


def psnr(found: Tensor, truth: Tensor) -> float:
    """Mean over images in one order, dB, capped at 60."""
    errors = (found.double() - truth.double()).square().flatten(1).mean(1)
    return float((-10 * errors.clamp(min=1e-6).log10()).mean())


def test_every_update_that_there_was_to_be_has_its_row(finished: Run) -> None:
    """Rule 11: an update that never arrived is a failed row of every attack, and not nothing."""
    rows = finished.rows()
    each = 2 * 3 * 2  # rounds, trials, clients
    for attack in ("dice", "witness"):
        for stack, expected in (("none", each), ("breaks", each), ("sum", each // 2)):
            own = [
                row
                for row in rows
                if (row["attack"]["name"], row["defense"]["name"]) == (attack, stack)
            ]
            assert len(own) == expected, (attack, stack)
    lost = of(finished, "dice", "breaks", status="failed")
    assert len(lost) == len(of(finished, "dice", "breaks")), "every second update was lost"
    assert all("no usable update" in row["reason"] for row in lost)


def test_the_restart_that_is_reported_has_the_least_own_loss(finished: Run) -> None:
    """Rule 1, in the attack stage: no job looks at the truth to choose."""
    for row in of(finished, "dice", "none", "sum"):
        seen, known = hand_over(
            recorded(finished, row), truth_of(finished, row), Grant(labels="inferred", bn="running")
        )
        solution = solve(
            Dice(), seen, known, seed_of(recorded(finished, row), "dice"), restarts=RESTARTS
        )
        assert row["metrics"]["attack_loss"] == min(solution.losses)
        saved = read_tensors(_saved(finished, row))
        images = solution.reconstruction.images
        assert images is not None
        assert torch.equal(saved["reconstruction"].sum(0), images[_order(saved, images)].sum(0))


def _order(saved: Mapping[str, Tensor], images: Tensor) -> list[int]:
    """Where each saved image is among `images`."""
    return [
        next(i for i, image in enumerate(images) if torch.equal(image, one))
        for one in saved["reconstruction"]
    ]


@pytest.mark.parametrize(
    ("knowledge", "handed"),
    [
        ({"labels": "none"}, set()),
        ({"labels": "inferred", "bn": "running"}, set()),
        ({"labels": "known"}, {"true_labels"}),
        ({"bn": "inferred"}, {"buffers_update"}),
        ({"bn": "exact"}, {"buffers_update", "exact_bn"}),
        ({"features": "known"}, {"true_features"}),
        ({"public": "test"}, {"public_images"}),
    ],
)
def test_an_attack_is_handed_what_its_row_says(
    installed: None, knowledge: dict[str, str], handed: set[str], tmp_path: Path
) -> None:
    """Rules 3 and 5: the grant that a row shows is the one that its attack was handed."""
    scenario = {
        **SCENARIO,
        "knowledge": knowledge,
        "defenses": {"none": []},
        "attacks": ["witness"],
        "training": {"rounds": 1, "local": {"batch_size": 4}},
        "observe": {"clients": [0], "batch_sizes": [2], "trials": 1},
    }
    (row,) = fedsim.run(scenario, out=tmp_path / "out", workers=1).rows()
    for what, granted in knowledge.items():
        assert row["knowledge"][what] == granted
    bits = int(row["metrics"]["attack_loss"])
    assert {name for name, bit in Witness.BITS.items() if bits & bit} == handed


def test_a_probe_is_the_declared_training_of_its_truth(finished: Run) -> None:
    """Rule 4: in the mode that the scenario and the recording declare."""
    for row in of(finished, "witness", "none"):
        seen, truth = recorded(finished, row), truth_of(finished, row)
        assert seen.training.mode == "train" == row["training"]["mode"]
        model = rebuild(seen).train()
        weights = {name: t.clone().requires_grad_() for name, t in seen.parameters.items()}
        scratch = {name: t.clone() for name, t in seen.buffers.items()}
        logits = functional_call(model, (weights, scratch), (normalize(truth.images, seen.model),))
        loss = nn.functional.cross_entropy(logits, truth.labels)
        gradient = torch.autograd.grad(loss, list(weights.values()))
        for name, expected in zip(weights, gradient, strict=True):
            torch.testing.assert_close(seen.update[name], expected, rtol=1e-3, atol=1e-6)


def test_the_buffers_of_a_recording_are_the_global_ones(finished: Run) -> None:
    """Rule 3: those that the client started from, and not what its batch made of them."""
    for round in (1, 2):
        rows = [row for row in of(finished, "witness", "none") if row["round"] == round]
        every = [recorded(finished, row).buffers for row in rows]
        means = [name for name in every[0] if name.endswith("running_mean")]
        assert means
        for name in means:
            assert all(torch.equal(own[name], every[0][name]) for own in every), "one model"
            assert bool(every[0][name].any()) == (round > 1), "zero before any training"


def test_the_guess_is_made_of_images_that_no_client_holds(finished: Run) -> None:
    """Rule 12: clients hold bright images and the test split is dark, so that guessing fails."""
    for row in of(finished, "dice", "none", "sum"):
        assert row["baseline"]["psnr"] < 5


def test_the_guess_is_a_good_one(installed: None, tmp_path: Path) -> None:
    """Rule 12: where the test split is like the clients' images, guessing is nearly right."""
    scenario = {
        **SCENARIO,
        "data": {"source": {"name": "lamps", "dark": 220}, "clients": 2},
        "defenses": {"none": []},
        "attacks": ["witness"],
        "training": {"rounds": 1, "local": {"batch_size": 4}},
        "observe": {"clients": "all", "batch_sizes": [2], "trials": 2},
    }
    for row in fedsim.run(scenario, out=tmp_path / "out", workers=1).rows():
        assert row["baseline"]["psnr"] > 30, "noise of at most 8 in 255 around the mean"


def test_a_saved_label_is_that_of_the_image_it_came_with(finished: Run) -> None:
    """Rule 9: where it is shown. It is scored, as the other update's is, whatever its image."""
    rows = of(finished, "dice", "none")
    saved = {row["observation"]: read_tensors(_saved(finished, row)) for row in rows}
    grant = Grant(labels="inferred", bn="running")
    for row in rows:
        own, seen = saved[row["observation"]], recorded(finished, row)
        seen, known = hand_over(seen, truth_of(finished, row), grant)
        answer = solve(Dice(), seen, known, seed_of(seen, "dice"), restarts=RESTARTS).reconstruction
        assert answer.images is not None and answer.labels is not None
        assert torch.equal(own["labels"], answer.labels[_order(own, answer.images)])
        saved_psnr = psnr(own["reconstruction"], own["truth"])
        assert row["metrics"]["psnr"] == pytest.approx(saved_psnr, abs=1e-3), "in one order"
        assert row["metrics"]["label_accuracy"] == _label_overlap(
            answer.labels, own["truth_labels"]
        )
        others = {
            _label_overlap(other["labels"], own["truth_labels"])
            for name, other in saved.items()
            if name != row["observation"]
        }
        assert row["control"]["other_update"]["label_accuracy"] in others


def test_the_control_is_of_another_client(finished: Run) -> None:
    """Rule 12: the same client's next batch may be of look-alikes, and would hide a leak."""
    rows = of(finished, "dice", "none")
    assert {row["client"] for row in rows} == {0, 1}
    for row in rows:
        control, own = row["control"], read_tensors(_saved(finished, row))
        assert control["of"] == "client"
        foreign = [each for each in rows if each["client"] != row["client"]]
        scored = [
            best_psnr(read_tensors(_saved(finished, each))["reconstruction"], own["truth"])
            for each in foreign
        ]
        best = control["other_update"]["psnr"]
        assert any(best == pytest.approx(value, abs=1e-3) for value in scored)
        assert len(control["per_image"]["psnr"]) == len(own["truth"])
        assert sum(control["per_image"]["psnr"]) / len(own["truth"]) == pytest.approx(best)
        guessed = row["baseline"]["per_image"]["psnr"]
        assert sum(guessed) / len(guessed) == pytest.approx(row["baseline"]["psnr"])


def _saved(run: Run, row: Mapping[str, Any]) -> Path:
    return reconstruction_path(run.out, "dice", row["observation"])


def test_the_guess_says_of_how_many_images_it_is_made(finished: Run) -> None:
    """Rule 12: of 40 public images, for each image that an update has."""
    for row in of(finished, "dice", "none"):
        size = len(row["victims"])
        assert row["baseline"]["public"] == 40
        assert row["baseline"]["public_per_image"] == 40 / size


def test_features_are_guessed_from_public_images(installed: None, tmp_path: Path) -> None:
    """Rule 12: a blind attack on features passes no control, though one trial has no other."""
    scenario = {
        **SCENARIO,
        "data": {"source": {"name": "lamps", "dark": 220}, "clients": 2},
        "model": {"name": "mlp", "hidden": [16], "head": {"width": 8}},
        "defenses": {"none": []},
        "attacks": ["dreams"],
        "observe": {"clients": [0], "batch_sizes": [4], "trials": 1, "rounds": [1]},
    }
    run = fedsim.run(scenario, out=tmp_path / "out", workers=1)
    (row,) = run.rows()
    assert row["metrics"]["subspace_error"] < 0.5, "as an attack that recovers most of them"
    seen, truth = recorded(run, row), truth_of(run, row)
    assert truth.features is not None
    with torch.no_grad():
        images = Lamps(dark=220).load().test_images.float() / 255
        public = rebuild(seen).eval().features(normalize(images, seen.model)).double()
    units = public / public.norm(dim=1, keepdim=True)
    basis = torch.linalg.svd(units).Vh[:4]
    wanted = truth.features.double()
    wanted = wanted / wanted.norm(dim=1, keepdim=True)
    outside = (wanted - wanted @ basis.T @ basis).norm(dim=1).mean()
    assert row["baseline"]["subspace_error"] == pytest.approx(float(outside), abs=1e-6)
    lines = leaderboard_rows([run.out])
    (control,) = positive_controls(lines)
    assert control.status == "failed"
    assert "half of what the guess leaves" in describe_control(control), row["baseline"][
        "subspace_error"
    ]


def test_what_a_replay_did_not_reconstruct_is_missing_and_not_scored(finished: Run) -> None:
    """Rule 11: away from a run there is no guess, and no gray stands for it."""
    row = of(finished, "dice", "none")[0]
    path = finished.out / "observations" / f"{row['observation']}.json"
    found, told = fedsim.attack(path, "half", seed=3)
    truth = truth_of(finished, row)
    assert found.images is not None and len(found.images) == 1
    assert told["missing"] == len(truth.images) - 1 == 2
    scored = [psnr(found.images, one[None]) for one in truth.images]
    assert told["metrics"]["psnr"] == pytest.approx(max(scored), abs=1e-3)


def best_psnr(found: Tensor, truth: Tensor) -> float:
    """Over all orders, by least squared error."""
    orders = [list(order) for order in permutations(range(len(truth)))]
    least = min(orders, key=lambda order: float((found[order] - truth).square().sum()))
    return psnr(found[least], truth)


def test_pictures_show_the_scored_pixels(finished: Run) -> None:
    """Rule 10: no picture is rescaled to its own range."""
    row = of(finished, "dice", "none")[0]
    path = reconstruction_path(finished.out, "dice", row["observation"])
    saved = read_tensors(path)
    shown = np.asarray(Image.open(path.with_suffix(".png")).convert("L"))
    for images in (saved["truth"], saved["reconstruction"]):
        for value in (images * 255).round().flatten().long().unique().tolist():
            assert value in shown
    scored = torch.cat([saved["truth"], saved["reconstruction"]])
    darkest = round(float(scored.min()) * 255)
    assert int(shown.min()) == darkest, "nothing is darker than what was scored"


def test_the_aggregate_leaves_no_single_update_behind(finished: Run) -> None:
    """Rule 17: behind an aggregation nothing that the server holds is one client's update."""
    files = sorted((finished.out / "observations" / "sum").rglob("*.json"))
    names = [f"aggregate-b3-t{trial}" for trial in range(3)]
    assert [path.stem for path in files] == 2 * names
    held = [load_observation(path) for path in files]
    for seen in held:
        assert (seen.client, seen.vantage, seen.num_clients) == (-1, "aggregate", 2)
        truth = load_truth(finished.out, seen.id)
        assert isinstance(truth, GroundTruth)
        assert len(truth.images) == 2 * seen.training.batch_size
    left = {path.stem for path in (finished.out / "observations" / "sum").rglob("*.safetensors")}
    assert left == {*names, "global"}, "the updates, and the model that they started from"
