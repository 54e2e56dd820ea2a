"""A run folder as the pipeline leaves it: real images, spoilt to a wanted PSNR, really scored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from answer_rows import NOTHING, save, trial
from safetensors.torch import save_file
from torch import Tensor

from fedsim.federation.records import REASONS
from fedsim.scoring import Guesser, Unavailable, score
from fedsim.targets.images import ImageAid
from fedsim.types import GroundTruth, Reconstruction

NO_LPIPS = Unavailable(
    "LPIPS: torchvision's cache has no alexnet-owt-7be5be79.pth; "
    "name a weights file in scoring.lpips_weights"
)
QUICK = ["--quiet", "--workers", "1"]
"""Options of `fedsim run` for a run of seconds."""


@dataclass(frozen=True)
class Stack:
    """A defense stack, how much of an image gets through it, and what it costs."""

    members: tuple[dict[str, Any], ...]
    through: float
    accuracy: float
    epsilon: float | None = None


STACKS: dict[str, Stack] = {
    "none": Stack((), 0.93, 0.742),
    "pruning": Stack(({"name": "gradient_pruning", "ratio": 0.9},), 0.74, 0.728),
    "dp": Stack(
        ({"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "multiplier": 1.1}),
        0.12,
        0.611,
        7.82,
    ),
}
ATTACKS: dict[str, float] = {"inverting_gradients": 1.0, "deep_leakage": 0.72}


def photos(count: int) -> Tensor:
    """(N, 3, 32, 32) pixels: tiles of photographs that come with scikit-image."""
    from skimage import data

    tiles = []
    for picture in (data.astronaut(), data.chelsea(), data.coffee(), data.rocket()):
        pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1).float() / 255
        pixels = F.interpolate(pixels[None], scale_factor=0.5, mode="area")[0]
        tiles += list(
            pixels.unfold(1, 32, 32).unfold(2, 32, 32).permute(1, 2, 0, 3, 4).flatten(0, 1)
        )
    chosen = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0))[:count]
    return torch.stack([tiles[i] for i in chosen])


def write_run(
    folder: Path,
    *,
    scenario: str = "photos-demo",
    stacks: Iterable[str] | Mapping[str, Stack] = ("none", "dp"),
    attacks: Mapping[str, float] = ATTACKS,
    batch_sizes: tuple[int, ...] = (1,),
    trials: int = 1,
    rounds: int = 1,
    variant: Mapping[str, Any] | None = None,
    undefended: float = 1.0,
) -> Path:
    """Fill `folder`; `undefended` scales how well the attacks work at all."""
    built = stacks if isinstance(stacks, Mapping) else {name: STACKS[name] for name in stacks}
    pool = photos(96)
    public = (pool[64:] * 255).round().byte()
    guesser = Guesser(public, torch.arange(len(public)) % 10)
    of_run = {"scenario": scenario, "variant": dict(variant or {}), "round": rounds}
    rows = [
        _row(folder, name, label, size, trial, stack, strength * undefended, rounds, pool, guesser)
        | of_run
        for name, stack in built.items()
        for label, strength in {**attacks, "label_inference": 0.0}.items()
        for size in batch_sizes
        for trial in range(trials)
    ]
    of_rounds = [
        _round(name, stack, round, rounds)
        for name, stack in built.items()
        for round in range(1, rounds + 1)
    ]
    save(folder, rows, of_rounds)
    (folder / "scenario.yaml").write_text(
        f"name: {scenario}\nseed: 7\ndata:\n  source: {{name: photos}}\n  clients: 10\n"
        "model: {name: convnet}\ntraining: {rounds: 8}\nscoring: {confidence: 0.95}\n"
        "# <script>alert('yaml')</script>\n"
    )
    record = {
        "scenario": scenario,
        "variant": variant or {},
        "seed": 7,
        "device": "cpu",
        "environment": {
            "python": "3.11.7",
            "processor": "a processor",
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "packages": {"fedsim": "0.1.0", "torch": "2.15.0", "flwr": "1.41.0"},
        },
        "seconds": 734.5,
        "bytes_on_wire": 93_000_000,
        "notes": {"lpips": NO_LPIPS.reason},
    }
    (folder / "record.json").write_text(json.dumps(record))
    return folder


def _row(
    folder: Path,
    name: str,
    label: str,
    size: int,
    number: int,
    stack: Stack,
    strength: float,
    rounds: int,
    pool: Tensor,
    guesser: Guesser,
) -> dict[str, Any]:
    stream = torch.Generator().manual_seed(1000 * number + size)
    guess = guesser.mean
    chosen = torch.randperm(64, generator=stream)[:size]
    truth = GroundTruth(images=pool[chosen], labels=chosen % 10)
    elsewhere = torch.randperm(64, generator=stream)[:size]
    only_labels = label == "label_inference"
    reconstruction = Reconstruction(
        images=None if only_labels else _spoilt(truth.images, guess, stack, strength, size, stream),
        labels=truth.labels if stack.through > 0.3 else truth.labels * 0 + 1,
        loss=1 - stack.through * strength,
        iterations=400,
    )
    failed = label == "deep_leakage" and stack.through < 0.5 and number == 0
    scores = score(reconstruction, truth, {"images": ImageAid(lpips=NO_LPIPS, fill=guess)})
    stem = f"round-{rounds:04d}/client-0000-b{size}-t{number}"
    foreign = None
    if not failed:
        other = pool[elsewhere]
        made = None if only_labels else _spoilt(other, guess, stack, strength, size, stream)
        read = elsewhere % 10 if stack.through > 0.3 else truth.labels * 0 + 1
        foreign = score(replace(reconstruction, images=made, labels=read), truth).metrics()
        tensors = {"truth": truth.images, "truth_labels": truth.labels}
        if reconstruction.images is not None:
            order = torch.tensor(scores.assignment)
            tensors["reconstruction"] = reconstruction.images[order].contiguous()
        path = folder / "reconstructions" / name / label / f"{stem}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
    answer = guesser(size)
    guessed = score(answer.answer(), truth, {"images": ImageAid(lpips=NO_LPIPS)}).metrics()
    proven = {"delta": 1e-5, "accountant": "gaussian", "unit": "client", "relation": "zero_out"}
    claim = NOTHING if stack.epsilon is None else proven | {"epsilon": stack.epsilon}
    return trial(None if failed else 0.0, trial=number, defense=name, attack=label) | {
        "dataset": "photos",
        "model": {"name": "convnet", "parameters": {"width": 64, "head": None}},
        "training": {"algorithm": "fedsgd", "steps": 1, "batch_size": size, "mode": "train"},
        "defense": {"name": name, "stack": [dict(member) for member in stack.members]},
        "batch_size": size,
        "observation": f"{name}/{stem}",
        "seed": 7 + number,
        "reason": "no restart ended at a finite loss (losses: (nan,))" if failed else None,
        "metrics": dict.fromkeys(scores.metrics()) if failed else scores.metrics(),
        "baseline": {"name": answer.name, **guessed},
        "control": {"other_update": foreign},
        "utility": {"train_loss": 0.9, "test_accuracy": stack.accuracy},
        "privacy": claim | {"audited_epsilon": None if stack.epsilon is None else 1.31},
        "cost": {"seconds": 0.4 if only_labels else 31.0 + number},
    }


def _spoilt(
    images: Tensor, guess: Tensor, stack: Stack, strength: float, size: int, stream: torch.Generator
) -> Tensor:
    kept = stack.through * strength * (1.0 if size == 1 else 0.8)
    blurred = F.avg_pool2d(images, 5, 1, 2, count_include_pad=False)
    detail = images if kept > 0.7 else blurred
    noise = torch.randn(images.shape, generator=stream) * 0.32 * (1 - kept)
    return (kept * detail + (1 - kept) * guess + noise).clamp(0, 1)


def _round(name: str, stack: Stack, round: int, rounds: int) -> dict[str, Any]:
    progress = 1 - 0.8 ** (6 * round / rounds)
    late = {"late": 1} if (name, round) == ("dp", 3) else {}
    return {
        "defense": name,
        "round": round,
        "participants": list(range(10)),
        "aggregated": 10,
        "train_loss": 2.3 - 1.5 * progress * stack.accuracy,
        "test_loss": 2.3 - 1.4 * progress * stack.accuracy,
        "test_accuracy": 0.1 + (stack.accuracy - 0.1) * progress / (1 - 0.8**6),
        "epsilon": "inf" if stack.epsilon is None else stack.epsilon * (round / rounds) ** 0.5,
        "failures": {**dict.fromkeys(REASONS, 0), **late},
        "details": ["client 3 did not answer within 600 s"] if late else [],
        "seconds": 1.2,
    }
