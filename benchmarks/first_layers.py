"""What the first layers of a transformer tell of its inputs, exactly, to an honest server.

`images`: `patch_inversion` on vision transformers of CIFAR-10 images, one image an update, over
norms, pooling, widths, training and defenses. `rank`: the rank of the first attention's gradient,
of 1 to 4 images, and what it tells of one where no position is trained. `tokens`: the span test of
Petrov et al., DAGER, NeurIPS 2024, on a GPT-2 of random weights.

    python benchmarks/first_layers.py images --images cifar10-images.zip --victims 20 --out OUT.csv
    python benchmarks/first_layers.py rank --images cifar10-images.zip --victims 5
    python benchmarks/first_layers.py tokens --repeats 5
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.contracts.plugins import load
from fedsim.data.folder import ImageFolder
from fedsim.models.base import build, denormalize, normalize
from fedsim.testing import make_observation
from fedsim.types import LocalTraining, ModelSpec

_SEED = 2027
_INSIDE = 1e-3
"""Relative distance from a span, up to which a vector lies in it, in float32."""

_TRIED = 20_000
"""Texts that are tried at a place at most."""

_STEPS = LocalTraining(
    algorithm="fedavg", steps=5, batch_size=1, lr=0.05, batches="same", momentum=0.9
)
_CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], LocalTraining | None]] = {
    "pre-norm, class token": ({}, [], None),
    "pre-norm, mean": ({"pool": "mean"}, [], None),
    "post-norm, class token": ({"norm": "post"}, [], None),
    "post-norm, mean": ({"norm": "post", "pool": "mean"}, [], None),
    "width 64": ({"width": 64}, [], None),
    "width 32": ({"width": 32}, [], None),
    "patches of 2x2 (256)": ({"patch": 2}, [], None),
    "clip 0.1": ({}, [{"name": "clip", "norm": 0.1}], None),
    "5 local steps": ({}, [], _STEPS),
    "8 bits": ({}, [{"name": "quantization", "bits": 8}], None),
    "noise 1e-6": ({}, [{"name": "gaussian_noise", "std": 1e-6}], None),
    "noise 1e-5": ({}, [{"name": "gaussian_noise", "std": 1e-5}], None),
    "noise 1e-4": ({}, [{"name": "gaussian_noise", "std": 1e-4}], None),
    "noise 1e-3": ({}, [{"name": "gaussian_noise", "std": 1e-3}], None),
    "pruning 0.1": ({}, [{"name": "gradient_pruning", "ratio": 0.1}], None),
    "pruning 0.9 of each tensor": (
        {},
        [{"name": "gradient_pruning", "ratio": 0.9, "scope": "tensor"}],
        None,
    ),
}


def cifar(path: Path, count: int) -> tuple[Tensor, Tensor]:
    """Held-out images of a folder or zip of CIFAR-10, as pixels, and their labels."""
    data = ImageFolder(path=str(path.resolve()), limit=1000).load()
    chosen = torch.randperm(len(data.test_images), generator=torch.Generator().manual_seed(_SEED))[
        :count
    ]
    return data.test_images[chosen].float() / 255, data.test_labels[chosen]


def psnr(found: Tensor, images: Tensor) -> float:
    return float(-10 * (found - images).square().mean().log10())


def measure_images(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each case: PSNR over the victims, and how many were called determined."""
    images, labels = cifar(args.images, args.victims)
    attack = load("fedsim.attacks", "patch_inversion")()
    rows = []
    for name, (model, defense, training) in _CASES.items():
        values, determined, wrong, seconds = [], 0, 0, []
        for seed in range(args.victims):
            observation, _ = make_observation(
                images[seed : seed + 1],
                labels[seed : seed + 1],
                model="vit",
                model_parameters=model,
                defense=defense,
                training=training,
                seed=seed,
            )
            start = time.perf_counter()
            try:
                found = solve(attack, observation, Knowledge(), seed=0).reconstruction
            except AttackFailed as error:
                print(f"{name}: {error}")
                continue
            seconds.append(time.perf_counter() - start)
            values.append(psnr(found.images, images[seed : seed + 1]))
            determined += bool(found.determined)
            wrong += bool(found.determined) and values[-1] < 40
        rows.append(
            {
                "case": name,
                "n": args.victims,
                "answered": len(values),
                "psnr_least": min(values, default=float("nan")),
                "psnr_median": statistics.median(values) if values else float("nan"),
                "determined": determined,
                "determined_below_40_dB": wrong,
                "seconds": statistics.median(seconds) if seconds else float("nan"),
            }
        )
        print(rows[-1], flush=True)
    return rows


def _span(gradient: Tensor) -> Tensor:
    """An orthonormal basis (r, d) of the row space of a gradient (k, d)."""
    _, lengths, directions = torch.linalg.svd(gradient.double(), full_matrices=False)
    rounding = 8 * torch.finfo(gradient.dtype).eps
    return directions[lengths > rounding * lengths[0]]


def measure_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each batch size: rank of the first attention's gradient, and what solves for it.

    Tokens t = E x + b + u are centered by the norm before attention. A vector of the span that is
    such a token of position p gives linear equations for x. Differences of two images' tokens lie
    in the range of E, so that the span of a batch holds that whole range as soon as they fill it:
    then the equations say nothing.
    """
    images, labels = cifar(args.images, 4 * args.victims)
    channels = images.shape[1]
    spec = ModelSpec(
        name="vit",
        parameters={"patch": 4, "width": 192},
        input_shape=(channels, *images.shape[2:]),
        num_classes=10,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
    )
    rows = []
    for batch, dtype in itertools.product((1, 2, 4), (torch.float32, torch.float64)):
        ranks, values = [], []
        for seed in range(args.victims):
            part = slice(seed * batch, (seed + 1) * batch)
            model = build(spec, seed).to(dtype)
            logits = model(normalize(images[part].to(dtype), spec))
            F.cross_entropy(logits, labels[part]).backward()
            named = dict(model.named_parameters())
            gradient = named["body.blocks.0.attn.qkv.weight"].grad
            assert gradient is not None
            basis = _span(gradient)
            ranks.append(len(basis))
            if batch == 1:
                patches = _by_span(basis, {n: p.detach() for n, p in named.items()})
                image = F.fold(patches.T[None], images.shape[2:], 4, stride=4).float()
                values.append(psnr(denormalize(image, spec).clamp(0, 1), images[part]))
        rows.append(
            {"batch": batch, "dtype": dtype, "ranks": ranks, "psnr_without_positions": values}
        )
        print(rows[-1], flush=True)
    return rows


def _by_span(basis: Tensor, parameters: Any) -> Tensor:
    """The patches (P, m) whose centered tokens lie in a span, of a model at its first weights."""
    embedding = parameters["body.patch_embed.proj.weight"].double().flatten(1)
    places = parameters["body.pos_embed"][0, 1:].double()
    places = places + parameters["body.patch_embed.proj.bias"].double()

    def outside(tokens: Tensor) -> Tensor:
        centered = tokens - tokens.mean(1, keepdim=True)
        return centered - centered @ basis.T @ basis

    return torch.linalg.lstsq(outside(embedding.T).T, -outside(places).T).solution.T


def measure_tokens(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each batch size: how much of the batch's text the span test recovers."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()

    length, vocabulary, width = 16, 5000, 256
    rows = []
    for batch in (1, 4, 8, 16, 32):
        sets, texts, seconds = [], [], []
        for seed in range(args.repeats):
            torch.manual_seed(seed)
            config = GPT2Config(
                vocab_size=vocabulary,
                n_positions=length,
                n_embd=width,
                n_layer=2,
                n_head=4,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
                attn_implementation="eager",
                bos_token_id=0,
                eos_token_id=0,
            )
            model = GPT2LMHeadModel(config)
            # Words of a language are as frequent as Zipf's law has it.
            chances = 1 / torch.arange(1.0, vocabulary + 1)
            text = chances.multinomial(batch * length, replacement=True).view(batch, length)
            model(text, labels=text).loss.backward()
            start = time.perf_counter()
            found, prefixes = _read(model, length)
            seconds.append(time.perf_counter() - start)
            # The last token of a text has no signal: nothing follows it.
            true = set(text[:, :-1].flatten().tolist())
            sets.append(len(true & found) / max(len(true | found), 1))
            wanted = {tuple(each.tolist()) for each in text[:, :-1]}
            texts.append(len(wanted & prefixes) / max(len(wanted), len(prefixes)))
        rows.append(
            {
                "batch": batch,
                "tokens": batch * (length - 1),
                "width": width,
                "n": args.repeats,
                "tokens_exact": statistics.mean(sets),
                "texts_exact": statistics.mean(texts),
                "seconds": statistics.median(seconds),
            }
        )
        print(rows[-1], flush=True)
    return rows


@torch.no_grad()
def _read(model: nn.Module, length: int) -> tuple[set[int], set[tuple[int, ...]]]:
    """The batch's tokens by the first attention's span, and its texts by the second's.

    A token lies in the first span also at places where it was not, if others connect the two: with
    a at 1 and 2, and b at 1, a vector for b at 2 follows. The second span tells where it was.
    """
    body = model.transformer  # type: ignore[attr-defined]
    first, second = (_span(block.attn.c_attn.weight.grad.T) for block in body.h[:2])
    likely = []
    for place in range(length - 1):
        tokens = body.h[0].ln_1(body.wte.weight + body.wpe.weight[place])
        likely.append(_inside(tokens, first).nonzero().flatten().tolist())
    found = {token for each in likely for token in each}
    prefixes: list[tuple[int, ...]] = [()]
    for tokens in likely:
        tried = torch.tensor([(*prefix, token) for prefix in prefixes for token in tokens])
        if not tried.numel() or len(tried) > _TRIED:
            return found, set()  # a span has told nothing apart
        places = torch.arange(tried.shape[1])
        hidden = body.h[0](body.wte(tried) + body.wpe(places))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        kept = _inside(body.h[1].ln_1(hidden[:, -1]), second)
        prefixes = [tuple(each.tolist()) for each in tried[kept]]
    return found, set(prefixes)


def _inside(vectors: Tensor, basis: Tensor) -> Tensor:
    """Which of the vectors (k, d) lie in a span (k,); none does in one that is everything."""
    vectors = vectors.double()
    if len(basis) >= vectors.shape[1]:
        return torch.ones(len(vectors), dtype=torch.bool)
    outside = vectors - vectors @ basis.T @ basis
    return outside.norm(dim=1) <= _INSIDE * vectors.norm(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=["images", "rank", "tokens"])
    parser.add_argument("--images", type=Path, help="CIFAR-10 as a folder or zip of images")
    parser.add_argument("--victims", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="CSV file of the rows")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure = {"images": measure_images, "rank": measure_rank, "tokens": measure_tokens}
    rows = measure[args.part](args)
    if args.out:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
