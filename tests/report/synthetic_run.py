"""A run folder as the pipeline leaves it: real images, spoilt to a wanted PSNR, really scored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
    "int8": Stack(({"name": "quantization", "bits": 8},), 0.92, 0.741),
    "noise": Stack(({"name": "gaussian_noise", "std": 0.01},), 0.45, 0.698),
    "dp": Stack(
        ({"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "multiplier": 1.1}),
        0.12,
        0.611,
        7.82,
    ),
}
ATTACKS: dict[str, float] = {"inverting_gradients": 1.0, "deep_leakage": 0.72}


def photos(count: int, side: int = 32) -> Tensor:
    """(N, 3, side, side) pixels: tiles of photographs that come with scikit-image."""
    from skimage import data

    tiles = []
    for picture in (data.astronaut(), data.chelsea(), data.coffee(), data.rocket()):
        pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1).float() / 255
        pixels = F.interpolate(pixels[None], scale_factor=0.5, mode="area")[0]
        tiles += list(
            pixels.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4).flatten(0, 1)
        )
    chosen = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0))[:count]
    return torch.stack([tiles[i] for i in chosen])


def write_run(
    folder: Path,
    *,
    scenario: str = "photos-demo",
    stacks: Mapping[str, Stack] = STACKS,
    attacks: Mapping[str, float] = ATTACKS,
    batch_sizes: tuple[int, ...] = (1, 4),
    trials: int = 4,
    rounds: int = 8,
    variant: Mapping[str, Any] | None = None,
    side: int = 32,
    undefended: float = 1.0,
) -> Path:
    """Fill `folder`; `undefended` scales how well the attacks work at all."""
    pool = photos(96, side)
    public = (pool[64:] * 255).round().byte()
    guesser = Guesser(public, torch.arange(len(public)) % 10)
    rows = [
        _row(
            folder,
            scenario,
            variant,
            name,
            stack,
            label,
            strength * undefended,
            size,
            trial,
            pool,
            guesser,
            rounds,
        )
        for name, stack in stacks.items()
        for label, strength in {**attacks, "label_inference": 0.0}.items()
        for size in batch_sizes
        for trial in range(trials)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    _lines(folder / "results.jsonl", rows)
    _lines(
        folder / "rounds.jsonl",
        [
            _round(name, stack, round, rounds)
            for name, stack in stacks.items()
            for round in range(1, rounds + 1)
        ],
    )
    (folder / "scenario.yaml").write_text(
        f"name: {scenario}\nseed: 7\ndata:\n  source: {{name: photos}}\n  clients: 10\n"
        "model: {name: convnet}\ntraining: {rounds: 8}\nscoring: {confidence: 0.95}\n"
        "# <script>alert('yaml')</script>\n"
    )
    (folder / "record.json").write_text(
        json.dumps(
            {
                "scenario": scenario,
                "variant": variant or {},
                "seed": 7,
                "device": "cpu",
                "environment": {
                    "python": "3.11.7",
                    "platform": "Linux",
                    "processor": "a processor",
                    "cores": 2,
                    "gpu": None,
                    "commit": "0123456789abcdef0123456789abcdef01234567",
                    "packages": {"fedsim": "0.1.0", "torch": "2.15.0", "flwr": "1.41.0"},
                },
                "seconds": 734.5,
                "peak_memory_bytes": 1_400_000_000,
                "bytes_on_wire": 93_000_000,
                "notes": {"lpips": NO_LPIPS.reason},
            }
        )
    )
    return folder


def _row(
    folder: Path,
    scenario: str,
    variant: Mapping[str, Any] | None,
    name: str,
    stack: Stack,
    label: str,
    strength: float,
    size: int,
    trial: int,
    pool: Tensor,
    guesser: Guesser,
    rounds: int,
) -> dict[str, Any]:
    stream = torch.Generator().manual_seed(1000 * trial + size)
    guess = guesser.mean
    chosen = torch.randperm(64, generator=stream)[:size]
    truth = GroundTruth(images=pool[chosen], labels=chosen % 10)
    elsewhere = torch.randperm(64, generator=stream)[:size]
    other = pool[elsewhere]
    loss = 1 - stack.through * strength
    only_labels = label == "label_inference"
    reconstruction = Reconstruction(
        images=None if only_labels else _spoilt(truth.images, guess, stack, strength, size, stream),
        labels=truth.labels if stack.through > 0.3 else truth.labels * 0 + 1,
        loss=loss,
        iterations=400,
    )
    failed = label == "deep_leakage" and stack.through < 0.5 and trial == 0
    scores = score(reconstruction, truth, {"images": ImageAid(lpips=NO_LPIPS, fill=guess)})
    foreign = None
    if not failed:
        made = None if only_labels else _spoilt(other, guess, stack, strength, size, stream)
        read = elsewhere % 10 if stack.through > 0.3 else truth.labels * 0 + 1
        foreign = score(replace(reconstruction, images=made, labels=read), truth).metrics()
    stem = f"round-{rounds:04d}/client-0000-b{size}-t{trial}"
    if not failed:
        tensors = {"truth": truth.images, "truth_labels": truth.labels}
        if reconstruction.images is not None:
            order = torch.tensor(scores.assignment)
            tensors["reconstruction"] = reconstruction.images[order].contiguous()
        path = folder / "reconstructions" / name / label / f"{stem}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
    return {
        "scenario": scenario,
        "variant": dict(variant or {}),
        "dataset": "photos",
        "model": {"name": "convnet", "parameters": {"width": 64, "head": None}},
        "learner": "sgd",
        "training": {
            "algorithm": "fedsgd",
            "steps": 1,
            "batch_size": size,
            "lr": 0.1,
            "momentum": 0.0,
            "mode": "train",
            "batches": "different",
            "dropout": 0.0,
        },
        "defense": {"name": name, "stack": [dict(member) for member in stack.members]},
        "attack": {"name": label, "label": label, "restarts": 1, "parameters": {}},
        "vantage": "server",
        "knowledge": {"labels": "inferred", "bn": "none"},
        "batch_size": size,
        "round": rounds,
        "client": 0,
        "trial": trial,
        "observation": f"{name}/{stem}",
        "seed": 7 + trial,
        "status": "failed" if failed else "ok",
        "reason": "no restart ended at a finite loss (losses: (nan,))" if failed else None,
        "metrics": dict.fromkeys(scores.metrics()) if failed else scores.metrics(),
        "baseline": {
            "name": guesser(size).name,
            **score(guesser(size).answer(), truth, {"images": ImageAid(lpips=NO_LPIPS)}).metrics(),
        },
        "control": {"other_update": foreign},
        "utility": {"train_loss": 0.9, "test_accuracy": stack.accuracy},
        "privacy": {
            "epsilon": "inf" if stack.epsilon is None else stack.epsilon,
            "delta": None if stack.epsilon is None else 1e-5,
            "accountant": None if stack.epsilon is None else "gaussian",
            "unit": None if stack.epsilon is None else "client",
            "relation": None if stack.epsilon is None else "zero_out",
            "reason": "no noise is added" if stack.epsilon is None else None,
            "audited_epsilon": None if stack.epsilon is None else 1.31,
        },
        "cost": {
            "seconds": 0.4 if only_labels else 31.0 + trial,
            "iterations": 400,
            "iterations_per_second": 12.9,
            "peak_memory_bytes": 900_000_000,
            "bytes_up": 250_000,
        },
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
        "zero_updates": 0,
        "probe_failures": 0,
        "bytes_up": 2_500_000,
        "bytes_down": 2_500_000,
        "seconds": 1.2,
    }


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
