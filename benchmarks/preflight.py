"""Does `fedsim preflight` rank deployments as full attacks do?

Thirty deployments: on the first ten the two constants of `fedsim/forecasting/gain.py` were set, in
view of the second ten two terms were added, and the last ten are held out. Each is forecast first,
and then attacked: `idlg` and `inverting_gradients`, and `spline_inversion` where a KAN is trained,
on three trials of different images. What is compared is the gain of the best attack, in dB over the
zero-information guess, as fedsim scores it; an attacker who gains nothing answers the guess, so
that no gain is below 0. Prints a line for each, and Spearman's rank correlation with a bootstrap
interval over deployments.

    python benchmarks/preflight.py OUT --cifar cifar10-images.zip [--only first|second|held_out]

What OUT holds of an earlier call is not attacked again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from scipy.stats import spearmanr
from torch import nn

import fedsim
from fedsim.data.bundled import Digits
from fedsim.forecasting.forecast import band_of, forecast
from fedsim.forecasting.plan import plans_of_scenario
from fedsim.report import leaderboard_rows
from fedsim.scoring import Guesser, score
from fedsim.types import Dataset, GroundTruth

TRIALS, SEED = 3, 11
MATCHING: list[Any] = [
    {"name": "idlg", "iterations": 300},
    {"name": "inverting_gradients", "iterations": 600},
]
DIGITS, FACES = {"name": "digits", "size": 16}, {"name": "faces", "size": 16}
SMALL = {"name": "digits", "size": 8}
CLIP = {"name": "clip", "norm": 1.0}
_BOOTSTRAP = 2000


def deployment(
    source: Any,
    model: Any,
    batch: int,
    *,
    stack: list[Any] | None = None,
    local: dict[str, Any] | None = None,
    clients: int = 4,
    attacks: list[Any] | None = None,
) -> dict[str, Any]:
    """A scenario of one round at fresh weights, with probes of one batch size."""
    return {
        "seed": SEED,
        "data": {"source": source, "clients": clients},
        "model": model,
        "training": {"rounds": 1, "local": {"batch_size": batch, **(local or {})}},
        "defenses": {"stack": stack or []},
        "attacks": [*MATCHING, *(attacks or [])],
        "observe": {"rounds": [1], "batch_sizes": [batch], "trials": TRIALS},
    }


def noise(multiplier: float) -> list[Any]:
    """Clipping to 1 and Gaussian noise."""
    return [CLIP, {"name": "gaussian_noise", "multiplier": multiplier}]


def first(cifar: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The ten on which constants were set."""
    pruning = [{"name": "gradient_pruning", "ratio": 0.99}]
    resnet = {"name": "resnet18", "norm": "group", "stem": "imagenet"}
    return {
        "lenet": deployment(DIGITS, "lenet", 1),
        "mlp-8": deployment(DIGITS, "mlp", 8),
        "lenet-4": deployment(FACES, "lenet", 4),
        "mlp-pruned": deployment(FACES, "mlp", 1, stack=pruning),
        "lenet-noise": deployment(DIGITS, "lenet", 1, stack=noise(0.01)),
        "convnet": deployment(cifar, {"name": "convnet", "width": 16}, 1),
        "resnet18-2": deployment(cifar, resnet, 2),
        "kan-4": deployment(SMALL, "kan", 4, attacks=["spline_inversion"]),
        "lenet-sum": deployment(FACES, "lenet", 2, stack=["aggregate"]),
        "lenet-steps": deployment(cifar, "lenet", 1, local={"steps": 3, "lr": 0.01}),
    }


def second(cifar: dict[str, Any]) -> dict[str, dict[str, Any] | None]:
    """Ten in view of which two terms were added; None: a model of torchvision, in no scenario."""
    pruning = [{"name": "gradient_pruning", "ratio": 0.9}]
    secure = [{"name": "clip", "norm": 10.0}, "secure_aggregation"]
    dp_sgd = [{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 0.002}]
    batch_norm = {"name": "convnet", "width": 8, "norm": "batch"}
    tanh, same = {"name": "mlp", "activation": "tanh"}, {"steps": 5, "lr": 0.05, "batches": "same"}
    rounding = [{"name": "quantization", "bits": 8}]
    return {
        "mlp": deployment(DIGITS, "mlp", 1),
        "lenet-faces": deployment(FACES, "lenet", 1),
        "mlp-4-pruned": deployment(cifar, "mlp", 4, stack=pruning),
        "lenet-2-quantized": deployment(FACES, "lenet", 2, stack=rounding),
        "mlp-steps": deployment(DIGITS, tanh, 1, local=same),
        "lenet-secure": deployment(DIGITS, "lenet", 1, clients=3, stack=secure),
        "lenet-dp": deployment(DIGITS, "lenet", 2, stack=dp_sgd),
        "convnet-bn-2": deployment(FACES, batch_norm, 2),
        "kan-2-noise": deployment(
            SMALL, "kan", 2, stack=noise(0.003), attacks=["spline_inversion"]
        ),
        "torchvision-mlp-2": None,
    }


def held_out() -> dict[str, dict[str, Any]]:
    """Ten that had no say in the formula."""
    sigmoid = {"name": "mlp", "activation": "sigmoid"}
    tanh, pruning = {"name": "mlp", "activation": "tanh"}, {"name": "gradient_pruning"}
    narrow, std = {"name": "convnet", "width": 8}, {"name": "gaussian_noise", "std": 0.05}
    return {
        "small-lenet-2": deployment(SMALL, "lenet", 2),
        "small-mlp-4": deployment(SMALL, "mlp", 4),
        "sigmoid-mlp": deployment(FACES, sigmoid, 1),
        "lenet-little-noise": deployment(DIGITS, "lenet", 1, stack=noise(0.001)),
        "lenet-only-noise": deployment(FACES, "lenet", 1, stack=[std]),
        "small-convnet": deployment(DIGITS, narrow, 1),
        "lenet-8": deployment(FACES, "lenet", 8),
        "tanh-mlp-2-pruned": deployment(SMALL, tanh, 2, stack=[{**pruning, "ratio": 0.7}]),
        "small-lenet-sum": deployment(SMALL, "lenet", 1, clients=2, stack=["aggregate"]),
        "mlp-3-steps": deployment(FACES, "mlp", 1, local={"steps": 3, "lr": 0.01}),
    }


class OwnModel:
    """torchvision's MLP on digits, batches of 2, by `fedsim.preflight` and `fedsim.observe`."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        mlp = torchvision.ops.MLP(256, [128, 64, 10], activation_layer=nn.GELU, inplace=None)
        self.model = nn.Sequential(nn.Flatten(), mlp)
        data = Digits(size=16).load()
        assert isinstance(data, Dataset)
        self.data = data
        self.of: dict[str, Any] = {"input_shape": (1, 16, 16), "classes": 10, "batch_size": 2}

    def predicted(self) -> tuple[float, float, float]:
        """Gain and band."""
        pixels = self.data.test_images.float() / 255
        told = fedsim.preflight(self.model, **self.of, images=pixels, labels=self.data.test_labels)
        return told.estimate.gain, *band_of(told.estimate.gain)

    def measured(self) -> float:
        """Gain of the best attack, dB."""
        guesser = Guesser(self.data.test_images, self.data.test_labels)
        gains: dict[str, list[float]] = {}
        for trial in range(TRIALS):
            chosen = slice(2 * trial, 2 * trial + 2)
            images = self.data.train_images[chosen].float() / 255
            labels = self.data.train_labels[chosen]
            loss = nn.functional.cross_entropy(self.model(images), labels)
            names, weights = zip(*self.model.named_parameters(), strict=True)
            update = dict(zip(names, torch.autograd.grad(loss, weights), strict=True))
            seen = fedsim.observe(self.model, update, **self.of)
            for chosen_attack in MATCHING:
                name, settings = chosen_attack["name"], {"iterations": chosen_attack["iterations"]}
                _, row = fedsim.attack(seen, name, settings, truth=(images, labels))
                guess = guesser(2).answer()

                base = score(guess, GroundTruth(images=images, labels=labels))["psnr"]
                gains.setdefault(name, []).append(row["metrics"]["psnr"] - base)
        return max(sum(each) / len(each) for each in gains.values())


def predicted(name: str, document: dict[str, Any], folder: Path) -> tuple[float, float, float]:
    """Gain and band of the forecast."""
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": name, **document}), encoding="utf-8")
    (plan,) = plans_of_scenario(path)
    told = forecast(plan)
    return told.estimate.gain, *band_of(told.estimate.gain)


def measured(name: str, document: dict[str, Any], folder: Path) -> float:
    """Gain of the best attack, dB: the mean over trials."""
    out = folder / name
    if not (out / "report.html").exists():
        fedsim.run({"name": name, **document}, out=out, workers=1, resume=out.exists())
    gains = [row.gain.mean for row in leaderboard_rows([out]) if row.gain]
    return max(gains)


def spearman(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Rank correlation of predictions and floored gains, with a 95% bootstrap interval."""
    told = np.array([row["predicted"] for row in rows])
    found = np.array([max(0.0, row["measured"]) for row in rows])
    generator = np.random.default_rng(0)
    values = []
    for _ in range(_BOOTSTRAP):
        chosen = generator.integers(len(rows), size=len(rows))
        if len({*told[chosen]}) > 1 and len({*found[chosen]}) > 1:
            values.append(spearmanr(told[chosen], found[chosen]).statistic)
    low, high = np.quantile(values, [0.025, 0.975])
    return float(spearmanr(told, found).statistic), float(low), float(high)


def main() -> None:
    """Runs both sets."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cifar", required=True, metavar="ZIP", help="CIFAR-10, an image_folder")
    parser.add_argument("--only", choices=["first", "second", "held_out"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    cifar = {"name": "image_folder", "path": options.cifar, "limit": 4000}
    sets: dict[str, Any] = {"first": first(cifar), "second": second(cifar), "held_out": held_out()}
    for kind, documents in sets.items():
        if options.only not in (None, kind):
            continue
        rows: list[dict[str, Any]] = []
        told: dict[str, tuple[float, float, float]] = {}
        seconds: dict[str, float] = {}
        for name, document in documents.items():  # all forecasts come before any attack
            start = time.perf_counter()
            told[name] = (
                predicted(name, document, options.out) if document else OwnModel().predicted()
            )
            seconds[name] = time.perf_counter() - start
        for name, document in documents.items():
            gain = measured(name, document, options.out) if document else OwnModel().measured()
            value, low, high = told[name]
            rows.append(
                {
                    "set": kind,
                    "name": name,
                    "predicted": round(value, 2),
                    "low": round(low, 2),
                    "high": round(high, 2),
                    "measured": round(gain, 2),
                    "within": low <= max(0.0, gain) <= high,
                    "seconds": round(seconds[name], 1),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        value, low, high = spearman(rows)
        print(
            json.dumps(
                {
                    "set": kind,
                    "n": len(rows),
                    "spearman": round(value, 3),
                    "interval": [round(low, 3), round(high, 3)],
                    "within": sum(row["within"] for row in rows),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
