"""Does `fedsim preflight` rank deployments as the full attacks do?

PLACEHOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import fedsim
from fedsim.report import leaderboard_rows
from fedsim.results.reading import load_runs

MATCHING = [
    {"name": "idlg", "iterations": 600},
    {"name": "inverting_gradients", "iterations": 600},
]


def app(
    source: Any,
    model: Any,
    batch: int,
    *,
    stack: list[Any] | None = None,
    local: dict[str, Any] | None = None,
    clients: int = 4,
    attacks: list[Any] | None = None,
) -> dict[str, Any]:
    """A scenario of one update, at the weights before any training."""
    return {
        "data": {"source": source, "clients": clients},
        "model": model,
        "training": {"rounds": 1, "local": {"batch_size": batch, **(local or {})}},
        "defenses": {"stack": stack or []},
        "attacks": [*MATCHING, *(attacks or [])],
        "observe": {"rounds": [1], "batch_sizes": [batch], "trials": 3},
    }


DIGITS, FACES = {"name": "digits", "size": 16}, {"name": "faces", "size": 16}
CIFAR = {"name": "image_folder", "path": "/work/shared/data/cifar10-images.zip", "limit": 4000}
NOISY = [{"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "multiplier": 0.01}]
SET = {
    "lenet": app(DIGITS, "lenet", 1),
    "mlp-8": app(DIGITS, "mlp", 8),
    "lenet-4": app(FACES, "lenet", 4),
    "mlp-pruned": app(FACES, "mlp", 1, stack=[{"name": "gradient_pruning", "ratio": 0.99}]),
    "lenet-noise": app(DIGITS, "lenet", 1, stack=NOISY),
    "convnet": app(CIFAR, {"name": "convnet", "width": 16}, 1),
    "resnet18-2": app(CIFAR, {"name": "resnet18", "norm": "group", "stem": "imagenet"}, 2),
    "kan-4": app({"name": "digits", "size": 8}, "kan", 4, attacks=["spline_inversion"]),
    "lenet-sum": app(FACES, "lenet", 2, stack=["aggregate"]),
    "lenet-steps": app(CIFAR, "lenet", 1, local={"steps": 3, "lr": 0.01}),
}
HELD_OUT = {
    "mlp": app(DIGITS, "mlp", 1),
    "lenet-faces": app(FACES, "lenet", 1),
    "mlp-4-pruned": app(CIFAR, "mlp", 4, stack=[{"name": "gradient_pruning", "ratio": 0.9}]),
    "convnet-bn-2": app(FACES, {"name": "convnet", "width": 8, "norm": "batch"}, 2),
    "kan-2-noise": app(
        {"name": "digits", "size": 8},
        "kan",
        2,
        stack=[{"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "multiplier": 0.003}],
        attacks=["spline_inversion"],
    ),
    "lenet-secure": app(
        DIGITS, "lenet", 1, clients=3, stack=[{"name": "clip", "norm": 10.0}, "secure_aggregation"]
    ),
    "lenet-2-quantized": app(FACES, "lenet", 2, stack=[{"name": "quantization", "bits": 8}]),
    "mlp-steps": app(
        DIGITS,
        {"name": "mlp", "activation": "tanh"},
        1,
        local={"steps": 5, "lr": 0.05, "batches": "same"},
    ),
    "lenet-dp": app(
        DIGITS, "lenet", 2, stack=[{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 0.002}]
    ),
}


def measured(folder: Path):
    rows = leaderboard_rows([folder])
    return {
        r.attack: (
            r.gain and r.gain.mean,
            r.own_gain and r.own_gain.mean,
            r.strongest,
            r.seconds,
            r.failures,
        )
        for r in rows
    }


def main() -> None:
    import sys, time

    out = Path(sys.argv[1])
    for name in sys.argv[2:]:
        document = SET.get(name) or HELD_OUT[name]
        t = time.time()
        folder = out / name
        try:
            if not (folder / "report.html").exists():
                fedsim.run({"name": name, "seed": 11, **document}, out=folder, workers=1)
            print(name, round(time.time() - t, 1), measured(folder), flush=True)
        except Exception as e:
            print(name, "ERR", e, flush=True)


if __name__ == "__main__":
    main()
