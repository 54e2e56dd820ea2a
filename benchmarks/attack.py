"""Iterations per second of `inverting_gradients`, against peers on the same gradient in one run.

Peers, each in a process of its own, in turns with fedsim so that a busy machine slows all alike:
- `plain`: the same method written straight down in PyTorch (autograd through the cosine distance);
- `breaching`: the public suite's `invertinggradients`, where the package is importable.
The figure is the ratio of the median times of one iteration. With --quality, instead, fedsim and
breaching run the same number of iterations from starts of their own on the same victims, and their
PSNR is compared.

    python benchmarks/attack.py [--quick] [--case NAME] [--batches 1 4 8] [--profile]
                                [--quality N [--victims N]] [--images FILE_OR_FOLDER] [--json FILE]
                                [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng, scoring
from fedsim.contracts.attack import create
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.data.bundled import Photos
from fedsim.data.folder import ImageFolder
from fedsim.models.base import build, denormalize, normalize
from fedsim.models.local import gradient, loss_function
from fedsim.models.victim import rebuild
from fedsim.recording.files import load_observation, root_of
from fedsim.recording.truth import load_truth
from fedsim.system.device import compute_exactly, move_tensors, resolve_device
from fedsim.system.memory import keep_freed
from fedsim.types import Effect, GroundTruth, LocalTraining, ModelSpec, Observation, Reconstruction

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "convnet": ("convnet", {}),
    "convnet-planted": (
        "convnet",
        {
            "width": 16,
            "head": {"width": 4096, "planted": 3072, "planted_std": 0.3, "planted_gain": 0.03},
        },
    ),
    "convnet64": ("convnet", {"depth": 8, "width": 64, "norm": "batch"}),
    "resnet18-imagenet": ("resnet18", {"stem": "imagenet"}),
    "resnet18-small": ("resnet18", {"stem": "small"}),
}
_LENGTH = 4800  # the default of inverting_gradients
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def victim(
    case: str, batch: int, images: Tensor, index: int = 0, device: str = "cpu"
) -> tuple[Observation, GroundTruth]:
    """An undefended gradient of `batch` images (in eval mode for a single one), and the truth.

    Or of a folder of recordings, in place of a case, the one at `index`. Both lie on `device`.
    """
    observation, truth = _victim(case, batch, images, index)
    return move_tensors(observation, device), move_tensors(truth, device)


def _victim(case: str, batch: int, images: Tensor, index: int) -> tuple[Observation, GroundTruth]:
    if case not in CASES:
        path = sorted(Path(case).glob("*-t*.json"))[index]
        root = root_of(path)
        assert root is not None
        observation = load_observation(path)
        truth = load_truth(root, observation.id)
        assert isinstance(truth, GroundTruth)
        return observation, truth
    name, parameters = CASES[case]
    spec = ModelSpec(
        name=name,
        parameters=parameters,
        input_shape=(3, 32, 32),
        num_classes=10,
        mean=MEAN,
        std=STD,
    )
    model = build(spec, seed=0)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    training = LocalTraining(
        algorithm="fedsgd",
        steps=1,
        batch_size=batch,
        lr=0.1,
        mode="eval" if batch == 1 else "train",
    )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(index))
    pixels = images[order[:batch]].float() / 255
    labels = (torch.arange(batch) + index) % 10
    loss = loss_function(model, {n: b.clone() for n, b in buffers.items()}, training)
    observation = Observation(
        id="none/round-0001/client-0000-training",
        update=gradient(loss, weights, normalize(pixels, spec), labels),
        buffers_update={},
        parameters=weights,
        buffers=buffers,
        spec=spec,
        training=training,
        defense=(),
        effect=Effect(),
        vantage="server",
        round=1,
        client=0,
        num_clients=1,
        trial=0,
        seed=0,
    )
    return observation, GroundTruth(images=pixels, labels=labels)


Runner = Callable[[int, int], Tensor]
"""(iterations, of an attack that is so many long) -> pixels."""


def fedsim_runner(
    observation: Observation,
    truth: GroundTruth,
    name: str = "inverting_gradients",
    **parameters: Any,
) -> Runner:
    def run(iterations: int, length: int) -> Tensor:
        keep_freed()
        attack = create(name, {"iterations": length, **parameters})
        knowledge = Knowledge(grant=Grant(labels="known"), true_labels=truth.labels)
        state = attack.init(observation, knowledge, rng.generator(0, "attack", 0))
        for _ in range(iterations):
            state = attack.step(state)
        found = attack.postprocess(state).images
        assert found is not None
        return found

    return run


def plain_runner(observation: Observation, truth: GroundTruth) -> Runner:
    def run(iterations: int, length: int) -> Tensor:
        model = rebuild(observation)
        loss = loss_function(model, dict(observation.buffers), observation.training)
        target = list(observation.update.values())
        images = torch.randn(truth.images.shape, generator=torch.Generator().manual_seed(0))
        images = images.to(truth.images.device).requires_grad_()
        low = normalize(images.new_zeros(1, 3, 1, 1), observation.model)
        high = normalize(images.new_ones(1, 3, 1, 1), observation.model)
        optimizer = torch.optim.Adam([images], lr=0.1)
        at = [int(iterations * f) for f in (3 / 8, 5 / 8, 7 / 8)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, at, gamma=0.1)
        for _ in range(iterations):
            optimizer.zero_grad()
            found = gradient(loss, observation.parameters, images, truth.labels, create_graph=True)
            pairs = list(zip(found.values(), target, strict=True))
            product = sum((g * t).sum() for g, t in pairs)
            norms = sum(g.square().sum() for g, _ in pairs) * sum(
                t.square().sum() for _, t in pairs
            )
            down = (images[:, :, 1:] - images[:, :, :-1]).abs().mean()
            right = (images[..., 1:] - images[..., :-1]).abs().mean()
            (1 - product / norms.sqrt() + 0.1 * (down + right)).backward(inputs=[images])
            assert images.grad is not None
            images.grad.sign_()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                images.copy_(torch.minimum(torch.maximum(images, low), high))
        return denormalize(images.detach(), observation.model).clamp(0, 1)

    return run


def breaching_runner(
    observation: Observation, truth: GroundTruth, configuration: str = "invertinggradients"
) -> Runner | None:
    """The public suite on the same model and gradient; None where it is not installed."""
    try:
        import breaching
        from omegaconf import OmegaConf
    except ImportError:
        return None
    folder = Path(breaching.__file__).parent / "config" / "attack"
    base = OmegaConf.load(folder / "_default_optimization_attack.yaml")
    own = OmegaConf.load(folder / f"{configuration}.yaml")
    del own["defaults"]
    if "features" in own.regularization:
        # It divides by the gradient of the last layer's bias, which a two-layer head has not.
        own.regularization.features.scale = 0.0
    model = rebuild(observation)
    evaluated = observation.training.mode == "eval"
    spec = observation.model
    metadata = SimpleNamespace(
        shape=spec.input_shape, modality="vision", mean=spec.mean, std=spec.std
    )
    payload = {
        "parameters": list(model.parameters()),
        "buffers": list(model.buffers()) if evaluated else None,
        "metadata": metadata,
    }
    shared = {
        "gradients": list(observation.update.values()),
        "buffers": None,
        "metadata": {
            "num_data_points": len(truth.labels),
            "labels": truth.labels,
            "local_hyperparams": None,
            "data_key": "inputs",
        },
    }

    def run(iterations: int, length: int) -> Tensor:
        config = OmegaConf.merge(base, own)
        config.optim.max_iterations = iterations
        attacker = breaching.attacks.OptimizationBasedAttacker(
            model,
            torch.nn.CrossEntropyLoss(),
            config,
            {"dtype": torch.float, "device": truth.images.device},
        )
        torch.manual_seed(0)
        found, _ = attacker.reconstruct([payload], [shared], server_secrets={})
        return denormalize(found["data"].detach(), observation.model).clamp(0, 1)

    return run


def psnr(pixels: Tensor, truth: GroundTruth) -> float:
    claim = Reconstruction(images=pixels.cpu(), loss=0.0, iterations=0)
    value = scoring.score(claim, move_tensors(truth, "cpu"))["psnr"]
    assert value is not None
    return value


def floating_point_peak(device: str = "cpu") -> float:
    """Measured float32 peak of a matrix product on `device`, in GFLOP/s."""
    side = 2048 if device == "cpu" else 8192
    a = torch.randn(side, side, device=device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, a)
        finish(device)
        times.append(time.perf_counter() - start)
    return 2 * side**3 / min(times) / 1e9


def finish(device: str) -> None:
    """Wait for what `device` has been asked to compute."""
    if device != "cpu":
        torch.cuda.synchronize()


def forward_gflop(observation: Observation, truth: GroundTruth) -> float:
    """Multiplications and additions of one forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    model = rebuild(observation).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        F.softmax(model(truth.images), 1)
    return counter.get_total_flops() / 1e9


RUNNERS: dict[str, Callable[[Observation, GroundTruth], Runner | None]] = {
    "fedsim": fedsim_runner,
    "plain": plain_runner,
    "breaching": breaching_runner,
    "factored": partial(fedsim_runner, name="factored_inversion"),
    "fedsim-body": partial(fedsim_runner, tensors="body"),
    "breaching-modern": partial(breaching_runner, configuration="modern"),
}
SUITES = ("fedsim", "plain", "breaching")
"""Of the same method, whose iterations are compared."""


def profile(run: Runner) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run(5, _LENGTH)
    return found.key_averages().table(sort_by="self_cpu_time_total", row_limit=12)


class Suite:
    """One suite in a process of its own, as its users run it: none inherits another's memory."""

    def __init__(
        self,
        name: str,
        case: str,
        batch: int,
        images: str | None,
        threads: int,
        device: str = "cpu",
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, line = context.Pipe()
        arguments = (line, name, case, batch, images, threads, device)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        line.close()

    def ask(self, what: str, *arguments: int) -> Any:
        """Its answer, see `_serve`."""
        self._line.send((what, *arguments))
        return self._line.recv()

    def close(self) -> None:
        """End its process."""
        self._process.terminate()
        self._process.join()


def _serve(
    line: Connection,
    name: str,
    case: str,
    batch: int,
    images: str | None,
    threads: int,
    device: str,
) -> None:
    device = resolve_device(device)
    compute_exactly(device)  # the rivals, too
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    source = ImageFolder(path=images, limit=2000) if images else Photos()
    pictures = source.load().train_images
    while True:
        what, *arguments = line.recv()
        if what == "available":
            line.send(RUNNERS[name](*victim(case, batch, pictures, 0, device)) is not None)
            continue
        iterations, length, index = arguments
        observation, truth = victim(case, batch, pictures, index, device)
        run = RUNNERS[name](observation, truth)
        assert run is not None
        if what == "profile":
            line.send(profile(run))
            continue
        start = time.perf_counter()
        found = run(iterations, length)
        finish(device)
        line.send((time.perf_counter() - start, psnr(found, truth)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two cases, batch 1, few repeats")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of a timed run of the plain one"
    )
    parser.add_argument("--quality", type=int, default=0, metavar="ITERATIONS")
    parser.add_argument("--victims", type=int, default=20, help="whose PSNR --quality compares")
    parser.add_argument("--images", type=str, help="image folder or zip; default: bundled photos")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = resolve_device(arguments.device)
    quick = arguments.quick
    cases = arguments.case or (["convnet", "resnet18-imagenet"] if quick else list(CASES))
    rows = []
    peak = floating_point_peak(device)
    print(f"{device}, threads {arguments.threads}, matrix product peak {peak:.0f} GFLOP/s")
    for case in cases:
        for batch in [1] if quick else arguments.batches:
            suites = {
                n: Suite(n, case, batch, arguments.images, arguments.threads, device)
                for n in SUITES
            }
            suites = {n: suite for n, suite in suites.items() if suite.ask("available")}
            row: dict[str, Any] = {"case": case, "batch": batch}
            if arguments.quality:
                suites.pop("plain").close()
                row |= quality(suites, arguments.quality, arguments.victims)
            else:
                row |= speed(suites, 2 if quick else arguments.repeats, arguments.seconds)
                row["gflop_forward"] = forward_gflop(
                    *victim(case, batch, Photos().load().train_images)
                )
            rows.append(row)
            print(json.dumps(row), flush=True)
            if arguments.profile:
                print(suites["fedsim"].ask("profile", 5, _LENGTH, 0))
            for suite in suites.values():
                suite.close()
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def speed(suites: dict[str, Suite], repeats: int, seconds: float = 10.0) -> dict[str, Any]:
    """Seconds an iteration of a full-length attack, by the difference of two runs of its start.

    Each is of as many iterations as the plain suite does in so many `seconds`.

    No set-up is in it, nor what fedsim takes to record an iteration
    (`fedsim_attacks.fast_autograd._tape`).
    """
    short = 4
    times: dict[str, list[float]] = {name: [] for name in suites}
    for suite in suites.values():
        suite.ask("run", short, _LENGTH, 0)
    once = min(suites["plain"].ask("run", short, _LENGTH, 0)[0] for _ in range(2))
    # Long enough that set-up, recording and noise are small beside it.
    long = short + max(6, round(seconds * short / once))
    for _ in range(repeats):
        for name, suite in suites.items():
            less, more = (suite.ask("run", n, _LENGTH, 0)[0] for n in (short, long))
            times[name].append((more - less) / (long - short))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "iterations_per_second": {name: round(1 / value, 2) for name, value in medians.items()},
        "speed_over": {
            name: round(value / medians["fedsim"], 2)
            for name, value in medians.items()
            if name != "fedsim"
        },
        "n": repeats,
        "iterations": long - short,
    }


def quality(suites: dict[str, Suite], iterations: int, victims: int) -> dict[str, Any]:
    """PSNR after equal iterations on the same victims, each suite from one start of its own."""
    found = {
        name: [suite.ask("run", iterations, iterations, index)[1] for index in range(victims)]
        for name, suite in suites.items()
    }
    row: dict[str, Any] = {
        "psnr": {name: round(statistics.mean(values), 2) for name, values in found.items()},
        "victims": victims,
        "iterations": iterations,
    }
    for name in found.keys() - {"fedsim"}:
        gains = [ours - theirs for ours, theirs in zip(found["fedsim"], found[name], strict=True)]
        row[f"db_over_{name}"] = round(statistics.mean(gains), 2)
        row["standard_error"] = round(statistics.stdev(gains) / len(gains) ** 0.5, 2)
    return row


if __name__ == "__main__":
    main()
