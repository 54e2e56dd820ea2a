"""Derives every random stream from (seed, path), so that order of execution never matters.

Streams of different paths, such as `("batch", round, client)`, are unrelated, and the same in every
process. What protects people is drawn by `normal`, `uniform` and `signs` from AES-256 in counter
mode. In a simulation its key follows from the scenario's seed, and protects nobody outside of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import final

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from fedsim.types import Tensors

_KEY_BYTES = 32
_WORDS = 624
"""Number of 32-bit words in the whole state of MT19937, PyTorch's generator on the CPU."""
_STATE = slice(24, 24 + 8 * _WORDS)
"""Bytes of PyTorch's serialized generator that hold these words, each in 64 bits. Before them are
the number of words left of the last block and the place of the next one."""
_BELOW_ONE = 1 - 2.0**-53
"""The largest float64 below 1. The last middle rounds to 1, whose normal value is infinite."""


def derive(seed: int, *path: str | int) -> int:
    """Returns the seed, in [0, 2^63), of the stream `path` under `seed`.

    A path is a name and numbers, such as `"batch", 1, 0`; in it 1 and "1" differ.
    """
    digest = hashlib.sha256(_text(seed, path)).digest()
    # One bit is dropped, so that the seed fits a signed 64-bit integer.
    return int.from_bytes(digest[:8], "big") >> 1


def of_bytes(content: bytes) -> int:
    """Returns a seed in [0, 2^63) of `content`, which nobody without the content can derive."""
    # The prefix keeps contents apart from paths, whose text begins with a bracket.
    return int.from_bytes(hashlib.sha256(b"fedsim content\0" + content).digest()[:8], "big") >> 1


@final
class Stream(torch.Generator):
    """Serves torch's functions as a generator on the CPU, and has a cryptographic stream beside it.

    `normal`, `uniform` and `signs` of this module draw from the cryptographic stream. Draws from
    one do not advance the other. `generator` and `Stream.secret` make streams.
    """

    def __new__(cls, material: bytes) -> Stream:
        """Creates the base generator on the CPU, which is all that it asks about."""
        return super().__new__(cls)

    def __init__(self, material: bytes) -> None:
        """Derives both streams from the bytes `material`; neither reveals it, nor the other."""
        self.set_state(_mersenne_state(material))
        # Each use of the material has its own prefix: neither digest tells anything of the other.
        key = hashlib.sha256(b"fedsim noise\0" + material).digest()
        zeros = bytes(16)  # a key is used for one stream, so that its counter starts at 0
        self._keystream = Cipher(algorithms.AES(key), modes.CTR(zeros)).encryptor()

    @classmethod
    def secret(cls) -> Stream:
        """Returns a new stream from the operating system's randomness; no seed gives it again."""
        return cls(secrets.token_bytes(_KEY_BYTES))

    def keystream(self, count: int) -> bytes:
        """Returns the next `count` bytes of the cryptographic stream, which is advanced by them."""
        # Zeros encrypted in counter mode are the keystream itself.
        return self._keystream.update(bytes(count))


def generator(seed: int, *path: str | int) -> Stream:
    """Returns a new `Stream` at the beginning of the stream `path` under `seed`, see `derive`."""
    return Stream(_text(seed, path))


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draws float64 values of `shape`, uniform on (0, 1) without either end.

    They are the rounded middles of 2^53 equal parts. A `Stream` draws from its cryptographic
    stream, on the CPU. Any other generator draws by `torch.rand`, on its own device.
    """
    if not isinstance(generator, Stream):
        drawn = torch.rand(
            tuple(shape), generator=generator, dtype=torch.float64, device=generator.device
        )
        # `rand` draws multiples of 2^-53; half a step more keeps out 0, whose log is infinite.
        return (drawn + 2.0**-54).clamp_(max=_BELOW_ONE)
    count = math.prod(shape)
    # The upper 53 of 64 bits: as many as a float64 holds exactly.
    words = np.frombuffer(generator.keystream(8 * count), dtype="<u8") >> np.uint64(11)
    values = np.minimum((words.astype(np.float64) + 0.5) * 2.0**-53, _BELOW_ONE)
    return torch.from_numpy(values).reshape(tuple(shape))


def normal(
    shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draws standard normal values of `shape` as `dtype`.

    A `Stream` draws from its cryptographic stream and computes in float64, on the CPU. Any other
    generator draws by `torch.randn`, on its own device.
    """
    if not isinstance(generator, Stream):
        return torch.randn(tuple(shape), generator=generator, dtype=dtype, device=generator.device)
    from scipy.special import ndtri

    # Rounded to `dtype` last: 53 bits reach tails of 8.2 deviations, the 24 of float32 only 5.4.
    return torch.from_numpy(np.asarray(ndtri(uniform(shape, generator).numpy()))).to(dtype)


def signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draws float64 values -1 and +1 of `shape` with even odds, from what `uniform` draws."""
    return torch.where(uniform(shape, generator) < 0.5, -1.0, 1.0).double()


@contextmanager
def global_stream(seed: int) -> Iterator[None]:
    """Seeds torch's global generators by `seed` inside its `with` block.

    That of the CPU is restored afterwards. Those of CUDA are seeded if CUDA is in use, and not
    restored. It serves code that takes no generator, such as module initialization.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(_mersenne_state(_text(seed, ("global",))))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)
        yield


def _text(seed: int, path: tuple[str | int, ...]) -> bytes:
    return json.dumps([seed, *path]).encode()


def _mersenne_state(material: bytes) -> Tensor:
    """Returns the serialized state of a CPU generator that has drawn nothing yet."""
    digest = hashlib.shake_256(b"fedsim stream\0" + material).digest(4 * _WORDS)
    words = np.frombuffer(digest, "<u4")
    state = np.frombuffer(_fresh_state(), dtype=np.uint8).copy()
    # The other bytes say that no word is left: the first draw twists these before any shows.
    state[_STATE] = words.astype("<u8").view(np.uint8)
    return torch.from_numpy(state)


@cache
def _fresh_state() -> bytes:
    """Returns the state of a generator that is seeded and about to draw its first block."""
    return bytes(torch.Generator().manual_seed(0).get_state().numpy().tobytes())


def digest(*parts: Tensors) -> str:
    """Returns a hexadecimal SHA-256 of mappings of tensors, in the order of the arguments.

    Equal digests mean equal names, shapes, types and bytes. Devices and the order of names within
    a mapping do not matter.
    """
    found = hashlib.sha256()
    for part in parts:
        # Lengths, names, types and shapes are hashed: other inputs never hash as the same bytes.
        found.update(f"{len(part)}\n".encode())
        for name in sorted(part):
            value = part[name].detach().cpu().contiguous()
            found.update(f"{name!r} {value.dtype} {tuple(value.shape)}\n".encode())
            # Bytes tell 0.0 from -0.0 and one NaN from another, which comparisons do not.
            found.update(value.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
