"""Plans of a forecast, of a scenario or a run: an update as an attacker will be told of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.grant import Grant
from fedsim.contracts.stack import Stack
from fedsim.models.base import normalize
from fedsim.recording.files import by_number, load_observation
from fedsim.scenario import (
    Document,
    Scenario,
    build_stack,
    declared_training,
    expand,
    open_document,
)
from fedsim.scoring.guess import mean_image
from fedsim.training.schedule import Probe
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset, FedsimError, LocalTraining, ModelSpec, Observation, Table, Update
from fedsim.words import number_of


@dataclass(frozen=True, kw_only=True)
class StandIns:
    """Images, on the CPU, that stand in for those of the victims, which no forecast needs."""

    pixels: Tensor
    """(P, C, H, W) float32 in [0, 1]."""
    labels: Tensor
    """(P,) int64 classes of `pixels`."""
    guess: Tensor
    """(C, H, W) in [0, 1]: the image that an attacker guesses who saw no update."""
    source: str
    """Origin of the images, in words."""


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """The update that is forecast: its model, its batch, the `stack` it passes, what is granted."""

    stack_name: str
    observations: tuple[Observation, ...]
    """Observations as an attacker gets them, at least one, by round; `update` may be empty."""
    stack: Stack
    declared: LocalTraining
    """The local training before the stack's training defenses."""
    grant: Grant
    stand_ins: StandIns

    @property
    def first(self) -> Observation:
        """The observation of the earliest round."""
        return self.observations[0]

    @property
    def training(self) -> LocalTraining:
        """The local training behind the stack's training defenses."""
        return self.first.training

    def of_batches(self, size: int, clients: int) -> UpdatePlan:
        """Returns the same plan for batches of `size` images and a mean over `clients` clients."""
        return replace(
            self,
            observations=tuple(
                replace(each, training=replace(each.training, batch_size=size), num_clients=clients)
                for each in self.observations
            ),
            declared=replace(self.declared, batch_size=size),
        )

    def draw_batch(self, draw: int, largest: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns batch `draw`, from 0, of stand-ins: images, labels, and guess less images.

        Images and differences are normalized, (N, C, H, W) float64, and labels are (N,) int64. N is
        the batch size times the number of clients and of steps with different batches. A batch is
        the beginning of one of the `largest` size, at least its own. An image may come again.
        """
        steps = self.training.steps if self.training.batches == "different" else 1
        groups = steps * self.first.num_clients
        stream = rng.generator(self.first.seed, "stand-ins", draw)
        count = len(self.stand_ins.pixels)
        # As many passes over the stand-ins as it takes: drawn for the largest size, cut to this.
        order = torch.cat(
            [torch.randperm(count, generator=stream) for _ in range(-(-groups * largest // count))]
        )
        chosen = order[: groups * largest].view(groups, largest)
        chosen = chosen[:, : self.training.batch_size].flatten()
        spec = self.first.model
        images = normalize(self.stand_ins.pixels[chosen].double(), spec)
        guess = normalize(self.stand_ins.guess[None].double(), spec)
        return images, self.stand_ins.labels[chosen], guess - images


def synthetic(spec: ModelSpec, seed: int) -> StandIns:
    """Draws 64 images for the model `spec`, and uniform labels, by `seed`; the guess is grey.

    The amplitude spectrum 1/f is that of natural images (Field, Relations between the statistics of
    natural images and the response properties of cortical cells, JOSA A 1987).
    """
    stream, count = rng.generator(seed, "synthetic"), 64
    channels, height, width = spec.input_shape
    white = torch.randn(count, channels, height, width, generator=stream)
    down, across = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    # The constant has frequency 0: it is given the lowest one's amplitude.
    frequency = torch.hypot(down, across).clamp_min(1 / max(height, width, 2))
    shaped = torch.fft.irfft2(torch.fft.rfft2(white) / frequency, s=(height, width))
    deviation = shaped.std().clamp_min(1e-12)
    return StandIns(
        pixels=(0.5 + 0.25 * shaped / deviation).clamp(0, 1),
        labels=torch.randint(spec.num_classes, (count,), generator=stream),
        guess=torch.full(spec.input_shape, 0.5),
        source=f"{number_of(count, 'synthetic image')} with the spectrum of photographs",
    )


MOST_ROUNDS = 3
"""Most rounds of a run that are looked at: the first, the last, and one between."""
_MOST_STAND_INS = 1024


def plans_of_scenario(path: str | Path, overrides: Sequence[str] = ()) -> list[UpdatePlan]:
    """Returns a plan for each defense stack and batch size, at the weights before any training.

    Stacks, and sizes within, are in the scenario's order. `overrides` are its settings, `key=value`
    each. FedsimError: file or data cannot be read, it is a sweep, or trains no network of images.
    """
    scenario = _only(open_document(path, overrides), path)
    dataset = load_dataset(scenario)
    images = _stand_ins(dataset)
    plans = []
    for name in scenario.defenses:
        workload = Workload(scenario, name, dataset)
        if workload.spec is None or workload.spec.columns:
            raise FedsimError(
                f"learner: {scenario.learner.name} trains no network, and what it releases is no "
                "update of images; `fedsim privacy` tells what such a release guarantees"
            )
        parameters, buffers = workload.initial()
        # Behind an aggregation one update of all participants is seen, else a single client's.
        together = workload.stack.aggregation is not None
        clients = len(workload.plan(1).participants) if together else 1
        sizes = scenario.observe.batch_sizes or [scenario.training.local.batch_size]
        for size in sizes:
            observation = workload.observation(
                1,
                -1 if together else 0,
                Update(tensors={}, num_examples=0),
                workload.plant_probe(parameters, 1),
                buffers,
                probe=Probe(batch_size=size, trial=0),
                num_clients=clients,
            )
            plans.append(
                UpdatePlan(
                    stack_name=name,
                    observations=(observation,),
                    stack=workload.stack,
                    declared=workload.declared.as_probed(size),
                    grant=scenario.knowledge,
                    stand_ins=images,
                )
            )
    return plans


def plans_of_run(folder: str | Path) -> list[UpdatePlan]:
    """Returns a plan for each defense stack and batch size of a run, at up to 3 rounds' weights.

    Stacks are in the scenario's order, and sizes rise within. A FedsimError says that `folder` is
    not of one run, or has no recordings of a server. Without its data, stand-ins are synthetic.
    """
    root = Path(folder)
    if not (root / "scenario.yaml").is_file():
        raise FedsimError(
            f"{root}: no scenario.yaml in it; name a scenario file, or the folder of one run (of a "
            "sweep, that of a variant)"
        )
    scenario = _only(open_document(root / "scenario.yaml", ()), root)
    recorded = _find_recordings(root)
    if not recorded:
        raise FedsimError(
            f"{root}: no recording of a server below observations/; run the scenario, or name its "
            "file instead"
        )
    observations = [
        (stack, tuple(load_observation(path) for path in paths))
        for (stack, _), paths in recorded.items()
    ]
    first = observations[0][1][0]
    # By batch size; the scenario's order of stacks is kept below.
    observations.sort(key=lambda each: each[1][0].training.batch_size)
    declared = declared_training(scenario.training)
    try:
        images = _stand_ins(load_dataset(scenario))
    except FedsimError:  # the run's data source is not here
        images = synthetic(first.model, first.seed)
    return [
        UpdatePlan(
            stack_name=stack,
            observations=seen,
            stack=build_stack(scenario.defenses[stack]),
            declared=replace(declared, batch_size=seen[0].training.batch_size),
            grant=scenario.knowledge,
            stand_ins=images,
        )
        for stack in scenario.defenses
        for name, seen in observations
        if name == stack
    ]


def _only(document: Document, origin: str | Path) -> Scenario:
    variants = expand(document)
    if len(variants) > 1:
        raise FedsimError(
            f"{origin}: sweep: {number_of(len(variants), 'variant')}, and one is forecast at "
            "a time; choose one with --set"
        )
    return variants[0].scenario


def _find_recordings(root: Path) -> dict[tuple[str, str], list[Path]]:
    """Finds recordings by (stack, batch size), of up to `MOST_ROUNDS` rounds, one a round."""
    found: dict[tuple[str, str], dict[str, Path]] = {}
    # Trained batches, and of each probed batch size the first trial alone.
    pattern = re.compile(r"(client|aggregate)(-\d+)?-?(training|b\d+-t0)")
    for path in sorted((root / "observations").glob("*/round-*/*.json")):
        if match := pattern.fullmatch(path.stem):
            size = match[3].removesuffix("-t0")
            rounds = found.setdefault((path.parent.parent.name, size), {})
            rounds.setdefault(path.parent.name, path)
    return {
        key: _spread(sorted(rounds.values(), key=lambda path: by_number(path.parent)))
        for key, rounds in found.items()
    }


def _spread(paths: list[Path]) -> list[Path]:
    if len(paths) <= MOST_ROUNDS:
        return paths
    places = [round(k * (len(paths) - 1) / (MOST_ROUNDS - 1)) for k in range(MOST_ROUNDS)]
    return [paths[place] for place in places]


def _stand_ins(dataset: Dataset | Table) -> StandIns:
    if not isinstance(dataset, Dataset):
        raise FedsimError(
            f"data.source: {dataset.name} is a table, and attackability is forecast of images; "
            "`fedsim privacy` tells what a release of rows guarantees"
        )
    # Evenly spread over the split, whatever its order.
    step = -(-len(dataset.test_images) // _MOST_STAND_INS)
    images, labels = dataset.test_images[::step], dataset.test_labels[::step]
    return StandIns(
        pixels=images.float() / 255,
        labels=labels,
        guess=mean_image(dataset.test_images),
        source=f"{number_of(len(images), 'image')} of the test split of {dataset.name}, which no "
        "client holds",
    )
