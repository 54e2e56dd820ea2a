"""The image tables of Liu et al., Data Reconstruction Attacks and Defenses, in their own setting.

The victim is a ResNet-18 (small-image stem, batch norm) with the paper's head of 16,384 neurons,
after as many steps as one epoch of CIFAR-10 has, of which a malicious server then plants three
quarters. Statistics of batch norm are granted, as in the paper; labels are inferred. All defenses
and attacks of a batch size get the same batches. Iterations are far fewer than the paper's 10,000.

    python benchmarks/paper_tables.py train OUT --images cifar10-images.zip [--device cuda]
    python benchmarks/paper_tables.py attack OUT [--device cuda] [--workers 6] [--seconds 400]
    python benchmarks/paper_tables.py table OUT docs/results/paper-figures.csv
        > docs/results/paper-tables.csv
    python benchmarks/paper_tables.py picture OUT FILE

`attack` keeps a line for each batch and attack in OUT, and goes on where it ended; a worker takes
up to 15 GB of a GPU. `table` writes each cell of the paper with its figure beside ours; a cell that
was not run has none.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng
from fedsim.attacking.knowledge import hand_over
from fedsim.contracts.attack import AttackFailed, create, solve
from fedsim.contracts.grant import Grant
from fedsim.data.folder import ImageFolder
from fedsim.models.base import Classifier, build, normalize
from fedsim.models.head import build_honest, plant_neurons
from fedsim.recording.files import read_tensors, write_tensors
from fedsim.scoring import score, summarize
from fedsim.scoring.guess import Guesser
from fedsim.system.device import compute_exactly, move_tensors, resolve_device
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, LocalTraining, ModelSpec, Observation

SEED = 2027
HEAD = {"width": 16384, "planted": 12288, "planted_std": 1.0, "planted_gain": 0.01}
MEAN, STD = (0.4,) * 3, (0.25,) * 3
"""Those of `make_observation`."""
STEPS, BATCH, RATE, MOMENTUM = 781, 64, 0.001, 0.9
"""One epoch of CIFAR-10. The paper's rate of 0.1 is too large for a head of 16,384 neurons."""
LOCAL_RATE, LOCAL_STD = 0.01, 0.005
"""Of several local steps, which planted neurons of standard deviation 1 throw off."""

_COMBINED: dict[str, Any] = {
    "pixels_first": 0.86,
    "learning_rate": 0.0002,
    "tensors": "body",
    "cosines": "weighted_mean",
    "errors": "features",
    "features": "relative",
    "feature_weight": 1.0,
    "total_variation": 0.02,
    "variation": "chromatic",
    "jump_width": 1.0,
    "decay": "cosine",
    "batch_norm": 0.01,
}
_TENSOR = {"name": "tensor_features", "variance_reduction": True, "whiten": True, "rows": "all"}
ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor+unet": (
        "feature_inversion",
        {**_COMBINED, "features_from": {**_TENSOR, "refine": True}},
    ),
    "unet": ("feature_inversion", {**_COMBINED, "features_from": "none"}),
    "neither": ("feature_inversion", {**_COMBINED, "features_from": "none", "cosines": "sum"}),
    "as written": ("feature_inversion", {"features_from": "tensor_features"}),
    "tensor_features": ("tensor_features", {}),
    "inverting_gradients": ("inverting_gradients", {}),
    "inverting_gradients_body": ("inverting_gradients", {"tensors": "body"}),
    "factored_inversion": ("factored_inversion", {}),
}
"""`tensor+unet` is the combined attack of `scenarios/reconstruction/combined-small.yaml`, `unet`
the same without features, `neither` also without weights of tensors; `as written` is the paper's
objective and U-Net from random weights. Each gets `--iterations`, rivals twice as many."""
DEFENSES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    **{
        f"noise-{std:g}": [{"name": "gaussian_noise", "std": std}]
        for std in (1e-3, 0.01, 0.05, 0.1)
    },
    **{
        f"prune-{ratio:g}": [{"name": "gradient_pruning", "ratio": ratio}]
        for ratio in (0.3, 0.5, 0.7, 0.9, 0.99)
    },
    **{f"clip-{norm}": [{"name": "clip", "norm": float(norm)}] for norm in (2, 4, 8)},
    **{f"local-{steps}": [] for steps in (3, 5)},
    **{f"dropout-{rate:g}": [{"name": "dropout", "rate": rate}] for rate in (0.3, 0.5, 0.7)},
}
TRAINING = "none"
"""Stands for an attack where nobody attacks, and the loss of a training is measured."""
Cell = tuple[int, str, str]
"""Images, defense, attack."""
ONE_STEP = [way for way in DEFENSES if not way.startswith(("local", "dropout"))]
TRAINED = [way for way in DEFENSES if not way.startswith("local")]
LOCAL = [way for way in DEFENSES if way.startswith("local")]
MAIN = ("tensor+unet", "unet")
CELLS: list[Cell] = [
    *((count, way, "tensor_features") for count in (1, 2, 4, 8) for way in (*ONE_STEP, *LOCAL)),
    *((4, way, attack) for way in ONE_STEP for attack in (*MAIN, "inverting_gradients")),
    *((count, "none", attack) for count in (16, 32) for attack in (*MAIN, "inverting_gradients")),
    *((count, way, attack) for count in (8, 2) for way in ONE_STEP for attack in MAIN),
    *((4, way, "factored_inversion") for way in ONE_STEP),
    *((count, "none", "inverting_gradients_body") for count in (4, 16, 32)),
    *((count, "none", "neither") for count in (4, 8, 16, 32)),
    *((4, way, "as written") for way in ("none", "noise-0.001", "prune-0.9", "clip-4")),
    *((count, way, "tensor+unet") for count in (2, 4, 8) for way in LOCAL),
    *((count, way, "unet") for count in (2, 4, 8) for way in LOCAL),
    *((count, way, TRAINING) for count in (8, 4, 2) for way in TRAINED),
]
"""In the order in which they are tried."""


def specification(std: float = HEAD["planted_std"]) -> ModelSpec:
    """The victim, whose server plants weights of the standard deviation `std`."""
    return ModelSpec(
        name="resnet18",
        parameters={"stem": "small", "norm": "batch", "head": {**HEAD, "planted_std": std}},
        input_shape=(3, 32, 32),
        num_classes=10,
        mean=MEAN,
        std=STD,
    )


def train(out: Path, path: str, device: str, steps: int) -> None:
    """Trains the victim by SGD with momentum, and keeps weights and the images of the client."""
    if (out / "victim.safetensors").exists():
        return
    loaded = ImageFolder(path=path).load()
    compute_exactly(device)
    spec = specification()
    model = build_honest(spec, rng.derive(SEED, "model")).to(device).train()
    images, labels = loaded.train_images.to(device), loaded.train_labels.to(device)
    order = rng.generator(SEED, "batches")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for step in range(steps):
        part = torch.randint(len(images), (BATCH,), generator=order)
        optimizer.zero_grad()
        inputs = normalize(images[part].float() / 255, spec)
        loss = F.cross_entropy(model(inputs), labels[part])
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {float(loss.detach()):.2f}", flush=True)
    tensors = {"images": loaded.train_images[:2000], "labels": loaded.train_labels[:2000]}
    tensors |= {"test": loaded.test_images[:1000], "test_labels": loaded.test_labels[:1000]}
    write_tensors(out / "images.safetensors", tensors)
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    write_tensors(out / "victim.safetensors", state)


@cache
def _kept(out: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], Guesser]:
    kept = read_tensors(out / "images.safetensors")
    guesser = Guesser(kept["test"], kept["test_labels"])
    return kept, read_tensors(out / "victim.safetensors"), guesser


@cache
def _planted(std: float) -> Classifier:
    """The victim as built, of which only the places of planted weights are used."""
    return build(specification(std), rng.derive(SEED, "model"))


def observed(out: Path, cell: Cell, trial: int) -> tuple[Observation, GroundTruth]:
    """The update of one batch, with the planted neurons, and its truth."""
    count, way, _ = cell
    kept, weights, _ = _kept(out)
    local = None
    if way in LOCAL:
        steps = int(way.removeprefix("local-"))
        local = LocalTraining(
            algorithm="fedavg", steps=steps, batch_size=count, lr=LOCAL_RATE, batches="same"
        )
    spec = specification(LOCAL_STD if local else HEAD["planted_std"])
    model = _planted(spec.parameters["head"]["planted_std"])
    state = weights | plant_neurons(
        model,
        {name: weights[name] for name, _ in model.named_parameters()},
        rng.derive(SEED, "plant", trial),
    )
    stream = rng.generator(SEED, "batch", count, trial)
    chosen = torch.randperm(len(kept["images"]), generator=stream)[:count]
    return make_observation(
        kept["images"][chosen].float() / 255,
        kept["labels"][chosen],
        model=spec.name,
        model_parameters=spec.parameters,
        training=local,
        defense=DEFENSES[way],
        seed=trial,
        weights=state,
    )


def final_loss(out: Path, device: str, steps: int, cell: Cell, trial: int) -> float:
    """Trains from random weights on batches of the cell, each gradient behind its defense.

    Returns the mean loss of the last hundred batches (Table 6).
    """
    count, way, _ = cell
    kept, spec = _kept(out)[0], specification()
    model = build_honest(spec, rng.derive(SEED, "loss", trial)).to(device).train()
    model.set_dropout(sum(each["rate"] for each in DEFENSES[way] if each["name"] == "dropout"))
    stream = rng.generator(SEED, "loss", count, trial)
    chance = torch.Generator(device).manual_seed(rng.derive(SEED, "noise", trial) % 2**62)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    images, labels = kept["images"].to(device), kept["labels"].to(device)
    losses = []
    for _ in range(steps):
        part = torch.randint(len(images), (count,), generator=stream)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(normalize(images[part].float() / 255, spec)), labels[part])
        loss.backward()
        # As the plugins do it, on the gradients where they are.
        for each in DEFENSES[way]:
            _defend(list(model.parameters()), each, chance)
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses[-100:]).mean())


def _defend(parameters: Sequence[Tensor], defense: dict[str, Any], chance: torch.Generator) -> None:
    grads = [each.grad for each in parameters if each.grad is not None]
    if "std" in defense:
        for grad in grads:
            noise = torch.randn(grad.shape, generator=chance, device=grad.device)
            grad.add_(noise, alpha=defense["std"])
    elif "ratio" in defense:
        sizes = torch.cat([grad.abs().flatten() for grad in grads])
        least = sizes.kthvalue(max(1, round(defense["ratio"] * len(sizes)))).values
        for grad in grads:
            grad[grad.abs() <= least] = 0
    elif "norm" in defense:
        torch.nn.utils.clip_grad_norm_(parameters, defense["norm"])


def measured(out: Path, device: str, iterations: int, task: tuple[Cell, int]) -> dict[str, Any]:
    """The row of one attack on one batch; its images are kept."""
    cell, trial = task
    count, way, attack = cell
    row: dict[str, Any] = {"B": count, "defense": way, "attack": attack, "trial": trial}
    if attack == TRAINING:
        loss = final_loss(out, resolve_device(device), STEPS, cell, trial)
        return row | {"train_loss": loss, "iterations": STEPS}
    observation, truth = observed(out, cell, trial)
    # As granted: batch norm's statistics of the batch, and nothing else.
    observation, knowledge = hand_over(observation, truth, Grant(bn="exact"))
    row["guess"] = score(_kept(out)[2](count).answer(), truth)["psnr"]
    name, parameters = ATTACKS[attack]
    if name != "tensor_features":
        own = iterations * (1 if name == "feature_inversion" else 2)
        parameters = {**parameters, "iterations": own}
    device = resolve_device(device)
    seen, known = move_tensors(observation, device), move_tensors(knowledge, device)
    start = time.perf_counter()
    try:
        found = solve(create(name, parameters), seen, known, seed=trial).reconstruction
    except AttackFailed as error:
        if parameters.get("tensors") != "body":
            return row | {"failed": str(error)}
        # Strong pruning leaves nothing of the body: what is left is the head's.
        row["body"] = str(error)
        whole = {**parameters, "tensors": "all"}
        found = solve(create(name, whole), seen, known, seed=trial).reconstruction
    seconds = time.perf_counter() - start
    found = move_tensors(found, "cpu")
    scores = score(found, truth)
    if found.images is not None:
        both = {"truth": truth.images, "images": found.images[scores.assignment]}
        kept = {key: (255 * value).round().byte() for key, value in both.items()}
        write_tensors(out / f"pictures/{attack}-{way}-{count}-{trial}.safetensors", kept)
    return row | {
        **{key: round(value, 5) for key, value in scores.means.items()},
        "iterations": found.iterations,
        "seconds": round(seconds, 1),
        "device": device,
    }


def _prepare(device: str) -> None:
    torch.set_num_threads(1)
    compute_exactly(device)


def _try(out: Path, device: str, iterations: int, task: tuple[Cell, int]) -> dict[str, Any]:
    """Says what broke, where one attack must not end all others."""
    try:
        return measured(out, device, iterations, task)
    except Exception as error:  # out of memory, say: the other cells go on
        (count, way, attack), trial = task
        row = {"B": count, "defense": way, "attack": attack, "trial": trial}
        return row | {"broken": f"{type(error).__name__}: {error}"}


def attack(out: Path, device: str, workers: int, asked: argparse.Namespace) -> None:
    """Attacks the batches of every cell, the first of each before the second of any."""
    deadline = time.monotonic() + asked.seconds
    (out / "pictures").mkdir(exist_ok=True)
    file = out / "attacks.jsonl"
    rows = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    done = {
        (r["B"], r["defense"], r["attack"], r["trial"])
        for r in rows
        if not r.keys() & {"broken", "failed"}
    }
    tasks = [
        (cell, trial)
        for trial in range(asked.trials)
        for cell in CELLS
        if (*cell, trial) not in done and all(w in "/".join(map(str, cell)) for w in asked.only)
    ]
    # Its server imports once for all; this process has met no device when it starts.
    with multiprocessing.get_context("forkserver").Pool(workers, _prepare, (device,)) as pool:
        ask = partial(_try, out, device, asked.iterations)
        found = pool.imap_unordered(ask, tasks)
        for number in range(len(tasks)):
            try:
                row = found.next(timeout=max(0.1, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                print(f"out of time after {number} of {len(tasks)}", flush=True)
                break  # the pool's end ends its processes
            with file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            print(f"{number + 1}/{len(tasks)} {json.dumps(row)}", flush=True)


def table(out: Path, figures: Path) -> None:
    """Prints each of the paper's figures with ours: means over batches, Student's intervals."""
    with figures.open() as stream:
        papers = list(csv.DictReader(stream))
    rows = [json.loads(line) for line in (out / "attacks.jsonl").read_text().splitlines()]
    names = ["table", "B", "defense", "attack", "metric", "paper", "paper_sd"]
    writer = csv.DictWriter(
        sys.stdout, [*names, "ours", "low", "high", "n", "guess", "iterations"], lineterminator="\n"
    )
    writer.writeheader()
    for line in papers:
        own = [
            row
            for row in rows
            if all(str(row[key]) == line[key] for key in ("B", "defense", "attack"))
            and row.get(line["metric"]) is not None
        ]
        found = summarize([row[line["metric"]] for row in own])
        if found is not None:
            ends = {"ours": found.mean, "low": found.low, "high": found.high}
            line |= {key: "" if x is None else f"{x:.3f}" for key, x in ends.items()}
            line |= {"n": str(len(own)), "iterations": str(own[0]["iterations"])}
            if line["metric"] == "psnr":
                line["guess"] = f"{sum(row['guess'] for row in own) / len(own):.2f}"
        writer.writerow(line)


SHOWN = ("none", "clip-4", "noise-0.001", "noise-0.1", "prune-0.9", "prune-0.99")
"""Defenses of the picture, as in the paper's Figure 2."""


def picture(out: Path, file: Path) -> None:
    """Draws the first batch of 4 behind some defenses, as each attack of images sees it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    whose = ("truth", "inverting_gradients", "unet", "tensor+unet", "factored_inversion")
    figure, panels = plt.subplots(len(whose), len(SHOWN), figsize=(2.6 * len(SHOWN), 4.2))
    for name, line in zip(whose, panels, strict=True):
        for way, panel in zip(SHOWN, line, strict=True):
            panel.set(xticks=[], yticks=[])
            source = "tensor+unet" if name == "truth" else name
            kept = out / f"pictures/{source}-{way}-4-0.safetensors"
            if kept.exists():
                images = read_tensors(kept)["truth" if name == "truth" else "images"]
                panel.imshow(torch.cat(list(images), 2).permute(1, 2, 0).numpy())
            if name == "truth":
                panel.set_title(way, fontsize=9)
        line[0].set_ylabel(name.replace("_", "\n"), rotation=0, ha="right", va="center", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def main() -> None:
    """Runs one of the stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("train", "attack", "table", "picture"))
    parser.add_argument("out", type=Path, help="folder of weights and of measured batches")
    parser.add_argument("file", type=Path, nargs="?", help="the paper's figures; picture to write")
    parser.add_argument("--images", default="cifar10-images.zip", help="CIFAR-10, an image_folder")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the victim's training")
    parser.add_argument("--trials", type=int, default=3, help="batches of each cell")
    parser.add_argument("--iterations", type=int, default=500, help="steps of an attack")
    parser.add_argument("--only", nargs="+", default=[], help="cells with all of these words")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--workers", type=int, default=1, help="processes that attack")
    parser.add_argument("--seconds", type=float, default=1e6, help="time after which to stop")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.what == "train":
        train(asked.out, asked.images, asked.device, asked.steps)
    elif asked.what == "attack":
        attack(asked.out, asked.device, asked.workers, asked)
    elif asked.what == "table":
        table(asked.out, asked.file)
    else:
        picture(asked.out, asked.file)


if __name__ == "__main__":
    main()
