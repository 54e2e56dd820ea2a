"""Every random stream is derived from (seed, path), so that order of execution never matters.

A path is such as `("batch", round, client)`. The digest is SHA-256, so streams of neighbouring
paths are unrelated and a stream is the same in every process and on every engine. PyTorch seeds a
generator on the CPU by 32 bits of that: of 77,000 streams two are the same with even odds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *path: str | int) -> int:
    """A 63-bit seed for the stream `path` under `seed`.

    >>> derive(7, "batch", 1, 0) == derive(7, "batch", 1, 0)
    True
    >>> derive(7, "batch", 1, 0) == derive(7, "batch", 0, 1)
    False
    """
    digest = hashlib.sha256(json.dumps([seed, *path]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, *path: str | int) -> torch.Generator:
    """A CPU generator for the stream `path` under `seed`: one of 2^32."""
    return torch.Generator().manual_seed(derive(seed, *path))


@contextmanager
def global_stream(seed: int) -> Iterator[None]:
    """Seed torch's global stream inside the block, for code that takes no generator; then restore.

    Module initialization and `F.dropout` draw from the global stream only. CUDA streams are seeded
    but not restored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes milliseconds
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)
        yield
