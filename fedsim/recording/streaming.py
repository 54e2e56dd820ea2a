"""Writes arrays as safetensors piece by piece: no copy of them is made, and none is held.

A file's digest is XXH3 of 128 bits, a tenth of SHA-256's time: it tells damage, and is no proof.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fedsim.recording.files import write_pieces
from fedsim.system import paths
from fedsim.types import FedsimError

Arrays = Mapping[str, np.ndarray[Any, Any]]
"""Contiguous numpy arrays by name; they may share read-only memory with a message."""

_NAMES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}
_ALIGNED = 8
_LONGEST_HEADER = 100_000_000
"""Maximum size of a file's header in bytes, which readers of safetensors accept."""
_PIECE = 1 << 20
_RESERVED = "__metadata__"
"""Name that the format reserves, so that no tensor can have it."""
Piece = bytes | memoryview


def pieces(arrays: Arrays) -> Iterator[Piece]:
    """Yields the bytes of a safetensors file of contiguous `arrays`, piece by piece.

    A FedsimError refuses an array of a type that such files do not hold, one called `__metadata__`,
    and names that are too long together.
    """
    names, header = _header(arrays)
    yield header
    for name in names:
        if arrays[name].size:
            # No copy: contiguous memory is read as bytes.
            yield arrays[name].reshape(-1).view(np.uint8).data


def _header(arrays: Arrays) -> tuple[list[str], bytes]:
    """Returns the arrays' names in the order of the file, and the bytes before the first array."""
    # Wide numbers first, so that all of them are aligned.
    names = sorted(arrays, key=lambda name: -arrays[name].itemsize)
    places: dict[str, object] = {}
    start = 0
    for name in names:
        array = arrays[name]
        if array.dtype not in _NAMES:
            raise FedsimError(f"{name[:40]!r}: {array.dtype} cannot be recorded")
        if name == _RESERVED:
            raise FedsimError(f"a tensor is called {name}, and cannot be recorded by that name")
        end = start + array.nbytes
        places[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(places).encode()
    # Spaces after JSON are legal, and keep the arrays behind it aligned, too.
    text += b" " * (-len(text) % _ALIGNED)
    if len(text) > _LONGEST_HEADER:
        raise FedsimError("the names of the tensors are too long to be recorded")
    return names, len(text).to_bytes(8, "little") + text


def digest_of(arrays: Arrays) -> str:
    """Returns the XXH3-128 in hex of the file that `write` makes; errors are those of `pieces`."""
    digest = xxhash.xxh3_128()
    for piece in pieces(arrays):
        digest.update(piece)
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """Returns the XXH3-128 in hex of a regular file up to a TiB; a FedsimError refuses others."""
    digest = xxhash.xxh3_128()
    with paths.open_regular(path, paths.ARCHIVE) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def size_of(arrays: Arrays) -> int:
    """Returns the size in bytes of the file that `write` makes; errors are those of `pieces`."""
    return len(_header(arrays)[1]) + sum(array.nbytes for array in arrays.values())


def write(path: Path, arrays: Arrays, digest: str | None = None) -> str:
    """Writes contiguous `arrays` as safetensors, whole or not at all, and returns `digest_of` them.

    It does not wait for the disk: after a crash of the machine only the digest tells a torn file.
    `digest` is what `digest_of` returned for them, unchecked; None computes it. Errors are those of
    `pieces`, and an OSError where nothing can be written.
    """
    if digest is not None:
        write_pieces(path, pieces(arrays), private=True, durable=False)
        return digest
    # Counted while the pieces are written, so that the arrays are read once.
    counted = xxhash.xxh3_128()

    def count_pieces() -> Iterator[Piece]:
        for piece in pieces(arrays):
            counted.update(piece)
            yield piece

    write_pieces(path, count_pieces(), private=True, durable=False)
    return counted.hexdigest()
