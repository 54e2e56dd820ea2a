"""Draws truth and reconstruction side by side: the scored pixels, enlarged but never rescaled."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsim.recording.files import read_tensors, write_bytes
from fedsim.results.lines import ResultRow
from fedsim.results.reading import ReportError
from fedsim.results.record import files_of
from fedsim.scoring import check_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

_SHOWN_SIDE = 64
"""Images with a shorter side below so many pixels are enlarged by a whole factor."""

_GAP = 2
"""Pixels between two images."""


def enlargement(height: int, width: int, side: int = _SHOWN_SIDE) -> int:
    """Returns the whole factor that enlarges an image's shorter side to `side` pixels or more."""
    return max(1, -(-side // min(height, width)))


def save_grid(path: Path, truth: Tensor, reconstruction: Tensor, factor: int | None = None) -> None:
    """Writes a PNG: the truths above, each one's reconstruction below it.

    Args:
        path: of the PNG.
        truth: (N, C, H, W) pixels in [0, 1], C = 1 or 3.
        reconstruction: likewise, in matched order.
        factor: side of the square that each pixel becomes, of the same value rounded to 8 bits;
            default: `enlargement`.

    Raises:
        ScoringError: these are no pixels.
        ReportError: the two differ in shape, or have another number of channels.
    """
    height, width = truth.shape[-2:]
    factor = factor or enlargement(height, width)
    rows = []
    for images in _as_bytes(truth, reconstruction):
        enlarged = images.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        spaced = torch.nn.functional.pad(enlarged, (0, 0, 0, _GAP, 0, _GAP), value=255)
        rows.append(torch.cat(list(spaced), dim=1))
    write_bytes(path, _png(torch.cat(rows)[:-_GAP, :-_GAP]))


def save_grids(folder: Path) -> int:
    """Writes the PNG grid of every reconstructed image in a run's folder; returns their number.

    Raises:
        FedsimError: a reconstruction cannot be read.
    """
    count = 0
    for path in files_of(folder, "reconstructions/*/*/*/*.safetensors"):
        tensors = read_tensors(path)
        if "reconstruction" in tensors:
            save_grid(path.with_suffix(".png"), tensors["truth"], tensors["reconstruction"])
            count += 1
    return count


def data_uris(truth: Tensor, reconstruction: Tensor) -> list[tuple[str, str]]:
    """Returns each pair as two `data:` addresses of PNG images, one image pixel per pixel.

    Raises as `save_grid`.
    """
    both = _as_bytes(truth, reconstruction)
    return [(_uri(a), _uri(b)) for a, b in zip(*both, strict=True)]


def reconstruction_file(folder: Path, row: ResultRow) -> Path | None:
    """Returns where a row's reconstruction lies; None if it has none. Never outside `folder`."""
    if row.observation is None:
        return None
    stack, _, rest = row.observation.partition("/")
    root = folder / "reconstructions"
    path = root / stack / row.attack.label / f"{rest}.safetensors"
    try:
        inside = path.resolve().is_relative_to(root.resolve())
        return path if inside and path.is_file() else None
    except (OSError, ValueError):  # a name that no file can have
        return None


def _as_bytes(truth: Tensor, reconstruction: Tensor) -> tuple[Tensor, Tensor]:
    """Converts both to (N, H, W, C) uint8."""
    check_pixels(truth, "truth")
    check_pixels(reconstruction, "reconstruction")
    if truth.shape != reconstruction.shape or truth.shape[1] not in (1, 3):
        raise ReportError(
            f"expected pairs of gray or RGB images, got {tuple(truth.shape)} and "
            f"{tuple(reconstruction.shape)}"
        )
    shown = [
        (images * 255).round().byte().permute(0, 2, 3, 1) for images in (truth, reconstruction)
    ]
    return shown[0], shown[1]


NEAREST = 0
"""Pillow's resampling that enlarges a pixel to a square of the same value."""


def from_png(content: bytes) -> Image:
    """Returns the image of a PNG file that was made here."""
    from PIL import Image

    with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
        picture.load()
        return picture


def _uri(image: Tensor) -> str:
    return "data:image/png;base64," + base64.b64encode(_png(image)).decode()


def _png(image: Tensor) -> bytes:
    """Encodes a (H, W, C) uint8 image as PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    picture: Image.Image = Image.fromarray(image.squeeze(2).numpy())
    picture.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
