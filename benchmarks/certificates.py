"""Certificates over ten thousand images: how many there are, and how many are false.

`classifier_fit` says of which images it knows that features and labels are right. Here it is tried
on CIFAR-10 images behind ordinary classifiers (ConvNet, ResNet-18 with group norm; fresh, and after
some steps), undefended and behind defenses, and where its beliefs are wrong: defenses that are not
declared, several steps taken for one, another number of images, classifiers that give two batches
one gradient. A certificate is false if no image of the batch has that label and features of a
cosine of 0.999 and a length within 5 % of it.

The body is computed once for all images; what is attacked is the last layer's gradient.

    python benchmarks/certificates.py features OUT --images cifar10-images.zip
    python benchmarks/certificates.py attack OUT [--only WORD] [--but WORD]
    python benchmarks/certificates.py table OUT > docs/results/certificates.csv

`features` keeps features in OUT, `attack` a line for each batch, and both go on where they ended.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.data.folder import ImageFolder
from fedsim.models.base import build, normalize
from fedsim.recording.files import read_tensors, write_tensors
from fedsim.scenario.build import build_stack
from fedsim.scoring import false_certificates, share
from fedsim.testing.cases import make_observation, reference
from fedsim.types import UNKNOWN, Effect, GroundTruth, ModelSpec, Observation, Reconstruction
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._profile import Profile
from fedsim_attacks.classifier_features.classifier_fit import ClassifierFit, ClassifierSolver

SEED = 2027
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "convnet": ("convnet", {}),
    "resnet18": ("resnet18", {"stem": "imagenet", "norm": "group"}),
}
STEPS = (0, 100)
"""Of training before the attacked gradient, of 32 images each."""
IMAGES = 10_000
PER_CASE, PER_PLAIN = 32, 1000
"""Images that each network and state meets of a case, and undefended."""
CONFIDENCE = 0.95
FIT = ClassifierFit(starts=2, iterations=60, exchanges=0)
"""A short search: what goes wrong in it must not be certified."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the client computed from, and its classifier."""

    features: Tensor
    """(N, d)."""
    labels: Tensor
    weights: Tensor
    """(K, d)."""
    bias: Tensor | None
    stream: torch.Generator


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the attacker sees, and what it believes of it."""

    batch: Batch
    gradient: dict[str, Tensor]
    effect: Effect = Effect()  # noqa: RUF009 - it is frozen
    count: int | None = None
    """Images that the attacker believes to be in the batch; None: as many as there are."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A client's way to its update."""

    make: Callable[[Batch], Seen]
    sizes: tuple[int, ...] = tuple(range(1, 10))
    images: int = PER_CASE


def gradient_of(batch: Batch, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The gradient of the last layer, computed in `dtype`."""
    weights = batch.weights.to(dtype).requires_grad_()
    parts = [weights]
    if batch.bias is not None:
        parts.append(batch.bias.to(dtype).requires_grad_())
    logits = F.linear(batch.features.to(dtype), *parts)
    found = torch.autograd.grad(F.cross_entropy(logits, batch.labels), parts)
    names = ("head.weight", "head.bias")
    return {name: part.float() for name, part in zip(names, found, strict=False)}


def plain(batch: Batch) -> Seen:
    return Seen(batch=batch, gradient=gradient_of(batch))


def defended(*defenses: dict[str, Any], declared: bool = True) -> Callable[[Batch], Seen]:
    """An update behind `defenses`, whose sizes `clip` and `std` are relative to its own."""

    def make(batch: Batch) -> Seen:
        gradient = gradient_of(batch)
        flat = torch.cat([part.flatten() for part in gradient.values()])
        relative = {"norm": float(flat.norm()), "std": float(flat.square().mean().sqrt())}
        members = [
            reference({k: v * relative.get(k, 1) if k in relative else v for k, v in each.items()})
            for each in defenses
        ]
        stack = build_stack(members)
        training = template(batch.features.shape[1], len(batch.weights)).training
        update, _ = stack.apply(gradient, stack.init(gradient, training), batch.stream)
        effect = stack.effect(training) if declared else Effect()
        return Seen(batch=batch, gradient=dict(update), effect=effect)

    return make


def undeclared(*defenses: dict[str, Any]) -> Callable[[Batch], Seen]:
    return defended(*defenses, declared=False)


def unknown(batch: Batch) -> Seen:
    """A defense that does not say what it does."""
    return replace(plain(batch), effect=UNKNOWN)


def examples_clipped(batch: Batch) -> Seen:
    """Each image's gradient has a factor of its own."""
    factors = 0.1 + 0.9 * torch.rand(len(batch.labels), generator=batch.stream)
    parts = [
        gradient_of(replace(batch, features=x[None], labels=y[None]))
        for x, y in zip(batch.features, batch.labels, strict=True)
    ]
    gradient = {
        name: sum(
            (s * part[name] for s, part in zip(factors, parts, strict=True)),
            torch.zeros_like(parts[0][name]),
        )
        / len(parts)
        for name in parts[0]
    }
    return Seen(batch=batch, gradient=gradient, effect=Effect(scaled_examples=True))


def sent_as(dtype: torch.dtype, *, told: bool) -> Callable[[Batch], Seen]:
    """An update rounded to a shorter type; `told`: the attacker sees it in that type."""

    def make(batch: Batch) -> Seen:
        gradient = {k: v.to(dtype) for k, v in gradient_of(batch).items()}
        if not told:
            gradient = {k: v.float() for k, v in gradient.items()}
        return Seen(batch=batch, gradient=gradient)

    return make


def computed_in(dtype: torch.dtype) -> Callable[[Batch], Seen]:
    return lambda batch: Seen(batch=batch, gradient=gradient_of(batch, dtype))


def scaled(factor: float, *, declared: bool) -> Callable[[Batch], Seen]:
    """An update times a factor so small that float32 loses digits, or that nobody declares."""

    def make(batch: Batch) -> Seen:
        gradient = {k: v * factor for k, v in gradient_of(batch).items()}
        return Seen(batch=batch, gradient=gradient, effect=Effect(scaled=declared))

    return make


def stepped(rate: float, *, fresh: bool) -> Callable[[Batch], Seen]:
    """Three local steps that the attacker takes for one."""

    def make(batch: Batch) -> Seen:
        now, total = batch, [torch.zeros_like(p) for p in gradient_of(batch).values()]
        for _ in range(3):
            found = gradient_of(now)
            total = [t + g for t, g in zip(total, found.values(), strict=True)]
            features = now.features
            if fresh:
                features = features[:, torch.randperm(features.shape[1], generator=batch.stream)]
            else:  # the body's steps move the features too
                noise = torch.randn(features.shape, generator=batch.stream)
                features = features + rate * features.abs().mean() * noise
            now = replace(
                now,
                features=features,
                weights=now.weights - rate * found["head.weight"],
                bias=None if now.bias is None else now.bias - rate * found["head.bias"],
            )
        names = gradient_of(batch)
        return Seen(batch=batch, gradient={n: t / 3 for n, t in zip(names, total, strict=True)})

    return make


def miscounted(by: int) -> Callable[[Batch], Seen]:
    def make(batch: Batch) -> Seen:
        return replace(plain(batch), count=len(batch.labels) + by)

    return make


def mixed(gap: float) -> Callable[[Batch], Seen]:
    """Clipped, an image fewer believed, and two classes alone likely: logits of others are less."""

    def make(batch: Batch) -> Seen:
        assert batch.bias is not None
        bias = batch.bias.clone()
        bias[2:] -= gap
        seen = scaled(0.3, declared=True)(
            equal_labels(replace(batch, bias=bias, labels=batch.labels % 2))
        )
        return replace(seen, count=len(batch.labels) - 1)

    return make


def with_head(change: Callable[[Batch], Batch]) -> Callable[[Batch], Seen]:
    return lambda batch: plain(change(batch))


def equal_labels(batch: Batch) -> Batch:
    return replace(batch, labels=batch.labels[:1].expand(len(batch.labels)).clone())


def copied(by: float, *, label: bool) -> Callable[[Batch], Batch]:
    """The second image is the first, but for a relative difference; `label`: its label too."""

    def change(batch: Batch) -> Batch:
        features, labels = batch.features.clone(), batch.labels.clone()
        features[1] = features[0] + by * (features[1] - features[0])
        labels[1] = labels[0] if label else (labels[0] + 1) % len(batch.weights)
        return replace(batch, features=features, labels=labels)

    return change


def sharpened(factor: float, *, fitted: bool) -> Callable[[Batch], Batch]:
    """A classifier that is `factor` times as sure; `fitted`: it is right, too."""

    def change(batch: Batch) -> Batch:
        sharp = replace(
            batch,
            weights=factor * batch.weights,
            bias=None if batch.bias is None else factor * batch.bias,
        )
        if not fitted:
            return sharp
        return replace(sharp, labels=F.linear(batch.features, sharp.weights, sharp.bias).argmax(1))

    return change


def of_classes(count: int, *, bias: bool = True) -> Callable[[Batch], Batch]:
    """The first classes alone."""
    return lambda batch: replace(
        batch,
        weights=batch.weights[:count].clone(),
        bias=batch.bias[:count].clone() if bias and batch.bias is not None else None,
        labels=batch.labels % count,
    )


def unbiased(batch: Batch) -> Batch:
    return replace(batch, bias=None)


def twins(*, bias: bool) -> Callable[[Batch], Batch]:
    """Only one direction counts, and all classes but one are alike: lengths have two solutions."""

    def change(batch: Batch) -> Batch:
        direction = batch.features.mean(0) / batch.features.mean(0).square().sum()
        weights = -direction.expand(len(batch.weights), -1).clone()
        weights[0] = direction
        return replace(
            batch,
            weights=weights,
            bias=torch.zeros(len(weights)) if bias else None,
            labels=batch.labels * 0,
        )

    return change


def low_rank(rank: int, *, bias: bool) -> Callable[[Batch], Batch]:
    """A classifier of few directions."""

    def change(batch: Batch) -> Batch:
        left, values, right = torch.linalg.svd(batch.weights, full_matrices=False)
        weights = left[:, :rank] * values[:rank] @ right[:rank]
        return replace(batch, weights=weights, bias=batch.bias if bias else None)

    return change


def without_weights(*, bias: bool) -> Callable[[Batch], Batch]:
    """An untrained classifier of zeros: every class is as likely for every image."""

    def change(batch: Batch) -> Batch:
        classes = len(batch.weights)
        return replace(
            batch,
            weights=torch.zeros_like(batch.weights),
            bias=torch.zeros(classes) if bias else None,
            labels=torch.randperm(classes, generator=batch.stream)[: len(batch.labels)],
        )

    return change


def _noise(share: float) -> dict[str, Any]:
    return {"name": "gaussian_noise", "std": share}


_QUANTIZED = {"name": "quantization", "bits": 8}
_PRUNED = {"name": "gradient_pruning", "ratio": 0.9}
_CLIPPED = {"name": "clip", "norm": 0.3}

CASES: dict[str, Case] = {
    "undefended": Case(make=plain, images=PER_PLAIN),
    "clipping": Case(make=defended(_CLIPPED), images=2 * PER_CASE),
    "clipping of each image": Case(make=examples_clipped),
    "8 bits": Case(make=defended(_QUANTIZED)),
    "pruning 0.9": Case(make=defended(_PRUNED)),
    **{f"noise {s:g}": Case(make=defended(_noise(s))) for s in (0.001, 0.01, 0.1)},
    "a defense that says nothing of itself": Case(make=unknown),
    "clipping, undeclared": Case(make=undeclared(_CLIPPED)),
    "8 bits, undeclared": Case(make=undeclared(_QUANTIZED)),
    "16 bits, undeclared": Case(make=undeclared({**_QUANTIZED, "bits": 16})),
    "pruning 0.9, undeclared": Case(make=undeclared(_PRUNED)),
    "pruning 0.01, undeclared": Case(make=undeclared({**_PRUNED, "ratio": 0.01})),
    **{
        f"noise {s:g}, undeclared": Case(make=undeclared(_noise(s)))
        for s in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    },
    "sent as float16": Case(make=sent_as(torch.float16, told=True)),
    "sent as bfloat16": Case(make=sent_as(torch.bfloat16, told=True)),
    "rounded to float16, undeclared": Case(make=sent_as(torch.float16, told=False)),
    "rounded to bfloat16, undeclared": Case(make=sent_as(torch.bfloat16, told=False)),
    "computed in bfloat16": Case(make=computed_in(torch.bfloat16)),
    "computed in float16": Case(make=computed_in(torch.float16)),
    "times 1e-40": Case(make=scaled(1e-40, declared=True)),
    "times 0.999, undeclared": Case(make=scaled(0.999, declared=False)),
    "three steps of 1e-6 for one": Case(make=stepped(1e-6, fresh=False)),
    "three steps of 1e-4 for one": Case(make=stepped(1e-4, fresh=False)),
    "three steps of 0.01 for one": Case(make=stepped(0.01, fresh=False)),
    "three batches for one": Case(make=stepped(0.01, fresh=True)),
    "an image fewer believed": Case(make=miscounted(-1), sizes=tuple(range(2, 10))),
    "an image more believed": Case(make=miscounted(1), sizes=tuple(range(1, 9))),
    **{
        f"clipping, an image fewer believed, eight of ten classes lower by {gap:g}": Case(
            make=mixed(gap), sizes=(2, 3)
        )
        for gap in (4, 6, 8, 16, 40)
    },
    "equal labels": Case(make=with_head(equal_labels)),
    "an image twice": Case(make=with_head(copied(0, label=True)), sizes=tuple(range(2, 10))),
    "an image with two labels": Case(
        make=with_head(copied(0, label=False)), sizes=tuple(range(2, 10))
    ),
    **{
        f"an image and one {by:g} from it": Case(
            make=with_head(copied(by, label=True)), sizes=tuple(range(2, 10))
        )
        for by in (1e-4, 1e-2, 0.1)
    },
    "saturated softmax": Case(make=with_head(sharpened(30, fitted=False))),
    "tiny gradients": Case(make=with_head(sharpened(10, fitted=True))),
    "vanishing gradients": Case(make=with_head(sharpened(100, fitted=True))),
    "two classes": Case(make=with_head(of_classes(2)), sizes=(1,)),
    "two classes without bias": Case(make=with_head(of_classes(2, bias=False)), sizes=(1,)),
    "three classes": Case(make=with_head(of_classes(3)), sizes=(1, 2)),
    "three classes without bias": Case(make=with_head(of_classes(3, bias=False)), sizes=(1, 2)),
    "without bias": Case(make=with_head(unbiased)),
    "nine images without bias": Case(make=with_head(unbiased), sizes=(9,)),
    "twin classes": Case(make=with_head(twins(bias=True))),
    "twin classes without bias": Case(make=with_head(twins(bias=False)), sizes=(1, 2, 3)),
    **{
        f"classifier of rank {r}{'' if b else ' without bias'}": Case(
            make=with_head(low_rank(r, bias=b))
        )
        for r in (1, 2)
        for b in (True, False)
    },
    "classifier of zeros": Case(make=with_head(without_weights(bias=True))),
    "classifier of zeros without bias": Case(make=with_head(without_weights(bias=False))),
}


@cache
def template(dimension: int, classes: int) -> Observation:
    """An observation of a model whose features are what is fed to it, but for a ReLU."""
    observation, _ = make_observation(
        torch.rand(1, 1, 1, dimension),
        torch.zeros(1, dtype=torch.int64),
        model="mlp",
        model_parameters={"hidden": [dimension]},
        num_classes=classes,
    )
    return observation


def observe(seen: Seen) -> Observation:
    """What `classifier_fit` is handed. Its starts are features of noise, of the images' length."""
    batch = seen.batch
    assert batch.bias is not None
    base = template(batch.features.shape[1], len(batch.weights))
    body = batch.features.square().mean().sqrt() * torch.eye(batch.features.shape[1])
    values = (body, torch.zeros(len(body)), batch.weights, batch.bias)
    parameters = dict(zip(base.parameters, values, strict=True))
    still = (torch.zeros_like(body), torch.zeros(len(body)))
    update = dict(zip(base.parameters, (*still, *seen.gradient.values()), strict=True))
    return replace(
        base,
        parameters=parameters,
        update=update,
        effect=seen.effect,
        training=replace(base.training, batch_size=seen.count or len(batch.labels)),
    )


def solved(seen: Seen, seed: int) -> Reconstruction:
    """The attack's answer. Without a bias, which no model here lacks, from the right labels on.

    Raises:
        AttackFailed: it refuses.
    """
    batch = seen.batch
    if batch.bias is not None:
        return solve(FIT, observe(seen), Knowledge(), seed=seed).reconstruction
    effect, count = seen.effect, len(batch.labels)
    classifier = ClassifierGradient(
        weights=batch.weights.double(),
        gradient=seen.gradient["head.weight"].double(),
        biased=False,
        num_images=count,
        factors=count if effect.scaled_examples else int(effect.scaled),
        removed=effect.removed is not None,
        mixed=effect.mixed,
        noisy=effect.noisy,
        exact=effect.exact,
        dropout=False,
        rates=(),
        momentum=0.0,
    )
    classifier.check()
    noise = torch.randn(128, batch.features.shape[1], generator=batch.stream).relu()
    solver = ClassifierSolver(
        loss=torch.full((), torch.inf),
        problem=Profile(classifier),
        pool=noise * batch.features.square().mean().sqrt(),
        rng=batch.stream,
        starts=FIT.starts,
        iterations=FIT.iterations,
        labels=batch.labels.sort()[0],
        exchanges=FIT.exchanges,
    )
    while not solver.finished:
        solver.improve()
    return solver.reconstruction()


def compute_features(out: Path, images: Path) -> None:
    """Writes features and classifiers of all networks and states that OUT has not."""
    dataset = ImageFolder(path=str(images)).load()
    chosen = torch.randperm(len(dataset.train_images), generator=rng.generator(SEED, "images"))
    pixels, labels = dataset.train_images[chosen], dataset.train_labels[chosen]
    for network, (name, parameters) in NETWORKS.items():
        spec = ModelSpec(
            name=name,
            parameters=parameters,
            input_shape=dataset.input_spec.input_shape,
            num_classes=len(dataset.classes),
            mean=dataset.mean,
            std=dataset.std,
        )
        model = build(spec, rng.derive(SEED, network))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(max(STEPS) + 1):
            path = out / f"{network}-{step}.safetensors"
            if step in STEPS and not path.is_file():
                _write(path, model, pixels[:IMAGES], labels[:IMAGES], spec)
            # Images that are trained on are none of those that are attacked.
            part = slice(IMAGES + 32 * step, IMAGES + 32 * (step + 1))
            batch = normalize(pixels[part].float() / 255, spec)
            optimizer.zero_grad()
            F.cross_entropy(model(batch), labels[part]).backward()
            optimizer.step()


@torch.no_grad()
def _write(path: Path, model: Any, pixels: Tensor, labels: Tensor, spec: ModelSpec) -> None:
    features = []
    for start in range(0, len(pixels), 500):
        batch = normalize(pixels[start : start + 500].float() / 255, spec)
        features.append(model.body(batch).flatten(1))
        print(f"{path.stem}: {start + len(batch)} of {len(pixels)} images", file=sys.stderr)
    layer = next(part for part in model.head.modules() if isinstance(part, torch.nn.Linear))
    tensors = {"features": torch.cat(features), "labels": labels}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, {**tensors, "weights": layer.weight.clone(), "bias": layer.bias.clone()})


def batches(case: Case, start: int) -> Iterator[tuple[int, list[int]]]:
    """Yields numbers of batches and the images of each, from `start` on in the images' circle.

    Sizes follow each other from where `start` says, so that no case has the small ones alone.
    """
    number, left, first = 0, case.images, start
    while left > 0:
        size = case.sizes[(first + number) % len(case.sizes)]
        yield number, [(start + i) % IMAGES for i in range(size)]
        number, left, start = number + 1, left - size, start + size


def attack(out: Path, only: str, but: str | None) -> None:
    """Attacks what OUT has no line of, of cases with the word `only` and without `but`."""
    path = out / "batches.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    done = {tuple(json.loads(line)["key"]) for line in lines}
    start = 0
    with path.open("a") as file:
        for name, case in CASES.items():
            for network in NETWORKS:
                for step in STEPS:
                    known = read_tensors(out / f"{network}-{step}.safetensors")
                    for number, indices in batches(case, start):
                        start = (indices[-1] + 1) % IMAGES
                        key = (name, network, step, number)
                        if key in done or only not in name or (but and but in name):
                            continue
                        line = {"key": key, "images": indices, **_line(case, known, indices, key)}
                        print(json.dumps(line), file=file, flush=True)
                    print(f"{name}, {network} after {step} steps", file=sys.stderr)


def _line(
    case: Case, known: dict[str, Tensor], indices: list[int], key: tuple[Any, ...]
) -> dict[str, Any]:
    batch = Batch(
        features=known["features"][indices],
        labels=known["labels"][indices],
        weights=known["weights"],
        bias=known["bias"],
        stream=rng.generator(SEED, *key),
    )
    seen, began = case.make(batch), time.process_time()
    try:
        found = solved(seen, rng.derive(SEED, *key))
    except AttackFailed as error:
        return {"refused": str(error)}
    assert found.determined is not None and found.certified is not None
    return {
        "determined": int(found.determined.sum()),
        "certified": int(found.certified.sum()),
        "false": false_certificates(found, _truth(seen.batch)),
        "loss": found.loss,
        "seconds": round(time.process_time() - began, 3),
    }


def _truth(batch: Batch) -> GroundTruth:
    images = torch.zeros(len(batch.labels), 1, 1, 1)
    return GroundTruth(images=images, labels=batch.labels, features=batch.features)


def table(out: Path) -> None:
    """Prints a line for each case, network and state, and one for all."""
    sums: dict[tuple[Any, ...], dict[str, int]] = {}
    different = set()
    for text in (out / "batches.jsonl").read_text().splitlines():
        line = json.loads(text)
        different |= set(line["images"])
        for key in (tuple(line["key"][:3]), ("all", "", "")):
            cell = sums.setdefault(key, dict.fromkeys(_COUNTED, 0))
            cell["batches"] += 1
            cell["images"] += len(line["images"])
            cell["refused"] += len(line["images"]) * ("refused" in line)
            for field in _COUNTED[3:]:
                cell[field] += line.get(field, 0)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["case", "network", "steps", *_COUNTED, "false_share_at_most"])
    for key, cell in sums.items():
        count = cell["certified"]
        most = share(cell["false"], count, confidence=CONFIDENCE).high if count else ""
        writer.writerow([*key, *cell.values(), f"{most:.3g}" if count else ""])
    print(f"{len(different)} different images", file=sys.stderr)


_COUNTED = ("batches", "images", "refused", "determined", "certified", "false")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", choices=["features", "attack", "table"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=Path, help="CIFAR-10 as a zip of folders")
    parser.add_argument("--only", default="", help="cases with this word")
    parser.add_argument("--but", help="cases without this word")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "features":
        compute_features(given.out, given.images)
    elif given.what == "attack":
        attack(given.out, given.only, given.but)
    else:
        table(given.out)


if __name__ == "__main__":
    main()
