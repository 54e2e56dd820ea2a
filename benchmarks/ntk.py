"""Private NTK regression: accuracy against ε, by the paper's accounting and by the exact one.

The experiment of Figure 1 of Differential Privacy Mechanisms in Neural Tangent Kernel Regression:
10 classes, m = 256 neurons, λ = 10, δ = 2e-3, β = 1e-6, unit features, k samples as equation (1)
allows at ε with the paper's n = 1,000 and η_min = 7e-3. Beside it: whether the lemma that the paper
rests on applies at all, the exact ε of so many samples at the paper's distance M and at one that
holds for these data and any neighbour, and the control α = Y / λ, which drops the kernel matrix and
its ε. Of each number of samples also the accuracy on the training set, and how far predictions are
from those of the exact kernel: measured, and at most (`ntk_paper.deviation_bound`). In the last row
neighbours are as far apart as the unit ball is wide, so that any record may stand for any other, at
ε = 10 of the kernel matrix (with the least lift) and 10 of the inputs.

Bundled digits (8x8 pixels), or images of a folder or zip with `train/` and `test/`, of which a
ResNet-18 gives the features (scenarios/ntk/features.yaml trains it on the other images).

    python benchmarks/ntk.py [--trials 10] [--json FILE] [--csv FILE] [--plot FILE.png]
    python benchmarks/ntk.py --images cifar10-images.zip --weights none.safetensors [--features F]
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ntk_paper as paper
import torch
from torch import Tensor

from fedsim import rng
from fedsim.learners import ntk
from fedsim.recording.files import read_tensors, write_tensors

NEURONS, RIDGE, DELTA, BETA = 256, 10.0, 2e-3, 1e-6
PAPER_N, PAPER_SMALLEST = 1_000, 7e-3
INPUT_EPSILON, INPUT_DELTA = 0.1, 1e-6
"""Of X̃, on top of what K̃ costs; at so small a β it costs no accuracy."""
EPSILONS = (2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)
CLASSES = 10


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unit rows of 64 pixels: 1,000 to train on, the other 797 to test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=rng.generator(0, "digits"))
    rows = _unit(torch.from_numpy(data.data)[order])
    labels = torch.from_numpy(data.target)[order].long()
    return rows[:1000], labels[:1000], rows[1000:], labels[1000:]


def images(path: Path, weights: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unit features of the last 1,000 training and the first 100 test images of every class."""
    from fedsim.data.folder import ImageFolder
    from fedsim.models.base import build, normalize, read_weights
    from fedsim.types import ModelSpec

    data = ImageFolder(path=str(path), limit=5000).load()
    first = ImageFolder(path=str(path), limit=4000).load()  # what the ResNet was trained on
    spec = ModelSpec(
        name="resnet18",
        parameters={"stem": "imagenet"},
        input_shape=data.input_spec.input_shape,
        num_classes=len(data.classes),
        mean=first.mean,
        std=first.std,
    )
    model = build(spec, 0)
    parameters, buffers = read_weights(weights, model)
    model.load_state_dict({**parameters, **buffers}, strict=False)
    model.eval()

    def features(pixels: Tensor, labels: Tensor, chosen: slice) -> tuple[Tensor, Tensor]:
        picked = torch.cat([torch.where(labels == c)[0][chosen] for c in range(CLASSES)])
        with torch.no_grad():
            rows = [
                model.features(normalize(pixels[part].float() / 255, spec))
                for part in picked.split(200)
            ]
        return _unit(torch.cat(rows).double()), labels[picked]

    train = features(data.train_images, data.train_labels, slice(-1000, None))
    return *train, *features(data.test_images, data.test_labels, slice(100))


def experiment(
    train: Tensor, classes: Tensor, test: Tensor, truth: Tensor, trials: int
) -> dict[str, Any]:
    """Accuracies, and what they cost by either accounting."""
    from fedsim.privacy.mechanisms import laplace, wishart
    from fedsim_defenses.gaussian_sampling import square_root
    from fedsim_defenses.truncated_laplace import truncated_laplace

    n, d = train.shape
    weights = ntk.draw_weights(NEURONS, d, 1.0, rng.generator(0, "weights"))
    labels = ntk.one_hot(classes, CLASSES)
    gram = ntk.kernel(train, train, weights)
    smallest = float(torch.linalg.eigvalsh(gram)[0])
    gain = float(torch.linalg.eigvalsh(weights.T @ weights / NEURONS)[-1])
    printed = paper.distance(PAPER_N, BETA, PAPER_SMALLEST)
    holds = paper.of_data(BETA, smallest, gain=gain)
    change = paper.of_data_eigenvalues(BETA, smallest, gain=gain)

    def accuracy(alpha: Tensor, rows: Tensor) -> float:
        found = (ntk.kernel(test, rows, weights) @ alpha).argmax(1)
        return float((found == truth).double().mean())

    counts = {epsilon: paper.samples(epsilon, DELTA, printed) for epsilon in EPSILONS}
    root = square_root(gram)
    scores: dict[float, list[float]] = {epsilon: [] for epsilon in EPSILONS}
    trained: dict[float, list[float]] = {epsilon: [] for epsilon in EPSILONS}
    strays: dict[float, list[float]] = {epsilon: [] for epsilon in EPSILONS}
    cross = ntk.kernel(test, train, weights)
    exact = cross @ ntk.fit(gram, labels, RIDGE)
    control = []
    for trial in range(trials):
        reach = math.sqrt(d) * BETA
        bound = float(laplace.bound(reach, INPUT_EPSILON, INPUT_DELTA))
        noise = rng.generator(trial, "inputs")
        rows = truncated_laplace(train, reach / INPUT_EPSILON, bound, noise)
        control.append(accuracy(paper.fit_without_kernel(labels, RIDGE), rows))
        samples = paper.gaussian_samples(
            root, max(counts.values()), rng.generator(trial, "samples")
        )
        for epsilon, count in counts.items():
            alpha = paper.fit_sampled(samples[:, :count], labels, RIDGE)
            scores[epsilon].append(accuracy(alpha, rows))
            seen = (ntk.kernel(train, rows, weights) @ alpha).argmax(1)
            trained[epsilon].append(float((seen == classes).double().mean()))
            strays[epsilon].append(float((cross @ alpha - exact).abs().max()))
    return {
        "n": n,
        "tested": len(truth),
        "trials": trials,
        "smallest_eigenvalue": smallest,
        "paper_distance": printed,
        "distance": holds,
        "not_private": accuracy(ntk.fit(gram, labels, RIDGE), train),
        "not_private_train": float(
            ((gram @ ntk.fit(gram, labels, RIDGE)).argmax(1) == classes).double().mean()
        ),
        "largest_prediction": float(exact.abs().max()),
        "without_kernel": _spread(control),
        "diameter": diameter(train, labels, weights, accuracy, trials, gain),
        "rows": [
            {
                "epsilon_paper": epsilon,
                "samples": count,
                "lemma_applies": paper.condition(epsilon, DELTA, count, printed),
                "within_radius": printed <= paper.radius(epsilon, DELTA, count),
                "epsilon_exact_at_paper_distance": wishart.epsilon(count, printed, DELTA),
                "epsilon_exact": wishart.epsilon(count, change, DELTA),
                "accuracy": _spread(scores[epsilon]),
                "train_accuracy": _spread(trained[epsilon]),
                "deviation": _spread(strays[epsilon]),
                "deviation_at_most": float(
                    paper.deviation_bound(gram, cross, labels, RIDGE, count).max()
                ),
            }
            for epsilon, count in counts.items()
        ],
    }


def diameter(
    train: Tensor,
    labels: Tensor,
    weights: Tensor,
    accuracy: Callable[[Tensor, Tensor], float],
    trials: int,
    gain: float,
    count: int = 98,
    epsilon: float = 10.0,
) -> dict[str, Any]:
    """Accuracies where any record may stand in place of any other: β is the unit ball's diameter.

    Of a kernel matrix of private data alone with no lift nothing is proven at such a β. The least
    lift γ is sought at which `count` draws of N(0, K + γ I) are (ε, δ)-private.
    """
    from fedsim.privacy.mechanisms import kernel_distance, laplace, wishart
    from fedsim_defenses.gaussian_sampling import square_root
    from fedsim_defenses.truncated_laplace import truncated_laplace

    def stated(lift: float) -> float:
        change = kernel_distance.eigenvalues_under_lift(2.0, lift, gain=gain)
        return wishart.epsilon(count, change, DELTA)

    low, high = 1.0, 1e6
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stated(middle) > epsilon else (low, middle)
    root = square_root(ntk.kernel(train, train, weights) + high * torch.eye(len(train)))
    scale = math.sqrt(train.shape[1]) * 2.0 / epsilon
    bound = float(laplace.bound(math.sqrt(train.shape[1]) * 2.0, epsilon, INPUT_DELTA))
    bare, both = [], []
    for trial in range(trials):
        samples = paper.gaussian_samples(root, count, rng.generator(trial, "samples"))
        alpha = paper.fit_sampled(samples, labels, RIDGE)
        bare.append(accuracy(alpha, train))
        noise = rng.generator(trial, "inputs")
        both.append(accuracy(alpha, truncated_laplace(train, scale, bound, noise)))
    return {
        "samples": count,
        "epsilon": epsilon,
        "lift": high,
        "accuracy_of_exact_inputs": _spread(bare),
        "accuracy": _spread(both),
    }


def lines(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows as docs/results/ntk-digits.csv has them; the last is that of the diameter."""
    rows = [
        {
            "epsilon_by_equation_1": f"{row['epsilon_paper']:g}",
            "samples": row["samples"],
            "m_within_delta_of_lemma_5_4": "yes" if row["within_radius"] else "no",
            "epsilon_exactly": f"{row['epsilon_exact_at_paper_distance']:.2f}",
            "accuracy": f"{row['accuracy']['mean']:.3f}",
            "accuracy_std": f"{row['accuracy']['std']:.3f}",
            "train_accuracy": f"{row['train_accuracy']['mean']:.3f}",
            "deviation": f"{row['deviation']['mean']:.3g}",
            "deviation_at_most": f"{row['deviation_at_most']:.3g}",
            "trials": found["trials"],
        }
        for row in found["rows"]
    ]
    far = found["diameter"]
    last = dict.fromkeys(rows[0], "") | {
        "samples": far["samples"],
        "m_within_delta_of_lemma_5_4": "β = diameter",
        "epsilon_exactly": f"{2 * far['epsilon']:g}",
        "accuracy": f"{far['accuracy']['mean']:.3f}",
        "accuracy_std": f"{far['accuracy']['std']:.3f}",
        "trials": found["trials"],
    }
    return [*rows, last]


def draw(found: dict[str, Any], path: Path) -> None:
    """Accuracy against ε by either accounting."""
    import matplotlib.pyplot as plt

    rows = found["rows"]
    mean = [row["accuracy"]["mean"] for row in rows]
    figure, (axes, below) = plt.subplots(2, figsize=(6, 6), sharex=True, height_ratios=(2, 1))
    axes.plot([row["epsilon_paper"] for row in rows], mean, "o-", label="as the paper accounts")
    exact = [row["epsilon_exact_at_paper_distance"] for row in rows]
    axes.plot(exact, mean, "s-", label="the same releases, exactly")
    axes.axhline(found["not_private"], color="black", label="not private")
    axes.axhline(
        found["without_kernel"]["mean"], color="red", ls="--", label="without K, α = Y / λ"
    )
    trained = [row["train_accuracy"]["mean"] for row in rows]
    axes.plot([row["epsilon_paper"] for row in rows], trained, ":", label="training accuracy")
    stray = [row["deviation"]["mean"] for row in rows]
    below.plot([row["epsilon_paper"] for row in rows], stray, "o-", label="measured")
    most = [row["deviation_at_most"] for row in rows]
    below.plot([row["epsilon_paper"] for row in rows], most, "k--", label="at most, proven")
    below.set(yscale="log", ylabel="|f of K - f of K̃|", xlabel=f"ε of K̃ at δ = {DELTA:g}")
    below.legend()
    axes.set(xscale="log", ylabel="accuracy")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True)


def _spread(values: list[float]) -> dict[str, float]:
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return {"mean": statistics.fmean(values), "std": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, help="folder or zip; default: bundled digits")
    parser.add_argument("--weights", type=Path, help="a ResNet-18's, needed with --images")
    parser.add_argument("--features", type=Path, help="where to keep the features of the images")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    started = time.perf_counter()
    names = ("train", "train_labels", "test", "test_labels")
    if asked.features and asked.features.exists():
        kept = read_tensors(asked.features)
        data = kept["train"], kept["train_labels"], kept["test"], kept["test_labels"]
    elif asked.images:
        if not asked.weights:
            parser.error("--images needs --weights: see scenarios/ntk/features.yaml")
        data = images(asked.images, asked.weights)
    else:
        data = digits()
    if asked.features and not asked.features.exists():
        write_tensors(asked.features, dict(zip(names, data, strict=True)))
    found = experiment(*data, trials=asked.trials)
    found["seconds"] = time.perf_counter() - started
    text = json.dumps(found, indent=2)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n", encoding="utf-8")
    if asked.csv:
        rows = lines(found)
        with asked.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if asked.plot:
        draw(found, asked.plot)


if __name__ == "__main__":
    main()
