"""Training a generator on public images: a code for each is learned with the weights.

Bojanowski, Joulin, Lopez-Paz and Szlam, Optimizing the Latent Space of Generative Networks (GLO),
ICML 2018, with the squared error. No adversary, hence stable on few images too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng as streams
from fedsim_attacks.gradient_matching._generator import LATENT, Generator

_CODE_RATE = 1e-2
_WEIGHT_RATE = 1e-3
_BATCH = 16


def fit_generator(
    images: Tensor,
    *,
    width: int,
    iterations: int,
    seed: int,
    told: Callable[[int, Tensor], None] = lambda iteration, loss: None,
) -> Generator:
    """Fits a generator of `width` channels to `images`, pixels (M, C, H, W) in [0, 1].

    After each iteration `told` gets its number, from 1, and the mean squared error of its batch
    (0-d). Same arguments, same weights.
    """
    stream = streams.generator(seed, "codes")
    codes = torch.randn(len(images), LATENT, generator=stream).requires_grad_()
    with streams.global_stream(streams.derive(seed, "generator")):
        _, channels, height, columns = images.shape
        generator = Generator((channels, height, columns), LATENT, width)
    optimizer = torch.optim.Adam(
        [
            {"params": generator.parameters(), "lr": _WEIGHT_RATE},
            {"params": [codes], "lr": _CODE_RATE},
        ]
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for iteration in range(1, iterations + 1):
        chosen = torch.randperm(len(images), generator=stream)[:_BATCH]
        loss = F.mse_loss(generator(codes[chosen]), images[chosen])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        told(iteration, loss.detach())
    return generator
