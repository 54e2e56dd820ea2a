"""Draws truth and reconstruction side by side: the scored pixels, enlarged but never rescaled."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fedsim.recording.files import read_tensors, write_bytes
from fedsim.report.row import LeaderboardRow
from fedsim.results.lines import ResultRow
from fedsim.results.reading import ReportError, StoredRun
from fedsim.results.record import files_of
from fedsim.scoring import check_pixels, psnr
from fedsim.types import FedsimError

_SHOWN_SIDE = 64
"""Images with a shorter side below so many pixels are enlarged by a whole factor."""

_GAP = 2
"""Pixels between two images."""

PIXELS = 1 << 20
"""The images of a page have at most so many pixels (about 3 MB as PNG)."""

_PAIRS = 4
"""A page shows at most so many images of a batch."""

_LONGEST = 300
"""Why a picture cannot be read is cut behind so many characters."""

_Value = TypeVar("_Value")

Trial = tuple[ResultRow, Path]
"""A row of results.jsonl, and the file of its reconstruction."""


def enlargement(height: int, width: int, side: int = _SHOWN_SIDE) -> int:
    """Returns the whole factor that enlarges an image's shorter side to `side` pixels or more."""
    return max(1, -(-side // min(height, width)))


def save_grid(path: Path, truth: Tensor, reconstruction: Tensor, factor: int | None = None) -> None:
    """Writes a PNG: the truths above, each one's reconstruction below it.

    Args:
        path: File of the PNG.
        truth: (N, C, H, W) pixels in [0, 1], C = 1 or 3.
        reconstruction: Pixels of the same shape, in the order of the truths.
        factor: Side of the square that each pixel becomes; by default `enlargement`.

    Raises:
        ScoringError: a tensor holds no pixels.
        ReportError: the two differ in shape, or C is neither 1 nor 3.
    """
    write_bytes(path, encode_png(grid_of(*_as_bytes(truth, reconstruction), factor)))


def grid_of(truth: Tensor, reconstruction: Tensor, factor: int | None = None) -> Tensor:
    """Returns one (H', W', C) uint8 image with the truths above their reconstructions.

    Both tensors are (N, H, W, C) uint8. The truths are one row, from left to right, with white gaps
    between images. Each pixel becomes a square of side `factor`, by default `enlargement`.
    """
    factor = factor or enlargement(*truth.shape[1:3])
    rows = []
    for images in (truth, reconstruction):
        enlarged = images.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        spaced = torch.nn.functional.pad(enlarged, (0, 0, 0, _GAP, 0, _GAP), value=255)
        rows.append(torch.cat(list(spaced), dim=1))
    return torch.cat(rows)[:-_GAP, :-_GAP]


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


def reconstruction_file(folder: Path, row: ResultRow) -> Path | None:
    """Returns the file of a row's reconstruction, inside `folder`; None if there is none."""
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


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Holds a true image and what an attack made of it, each (H, W, C) of uint8.

    `psnr` is that of the answer, in dB.
    """

    pixels: tuple[Tensor, Tensor]
    psnr: float

    @property
    def truth(self) -> str:
        """The true image as a `data:` address, one image pixel per pixel."""
        return _uri(self.pixels[0])

    @property
    def reconstruction(self) -> str:
        """The attack's answer as a `data:` address, one image pixel per pixel."""
        return _uri(self.pixels[1])


@dataclass(frozen=True, kw_only=True)
class Plate:
    """Shows one trial of an attack on a defense, an image of its batch beside what became of it.

    `pairs` are from left to right; there are none if the pictures cannot be read.
    """

    pairs: list[Pair]
    hidden: int = 0
    """Number of images of the batch that are not shown."""
    width: int = 0
    height: int = 0
    """Size of an image on the page, in CSS pixels: a whole multiple of its own."""
    pixels: int = 0
    """Number of pixels that the pairs hold."""
    problem: str = ""
    """Why the pictures cannot be read; empty if they can."""

    def grid(self) -> Tensor:
        """Returns the pairs as one (H, W, C) uint8 image, see `grid_of`; there has to be a pair."""
        truths, images = zip(*(pair.pixels for pair in self.pairs), strict=True)
        return grid_of(torch.stack(truths), torch.stack(images))


def plates_of(
    rows: Sequence[LeaderboardRow], runs: Iterable[StoredRun]
) -> tuple[dict[str, Plate], int]:
    """Returns `LeaderboardRow.cell` -> plate, and the number of plates that have no room.

    All rows of one comparison, batch size and round show the same image first, so that defenses
    can be compared. It is the median image of the median trial of the first of these rows, which
    is undefended where one is. A row that did not attack that image shows its own median trial. The
    strongest attacks come first, until the page has 2^20 pixels (`PIXELS`).
    """
    scored = scored_trials(runs)
    victims: dict[tuple[object, ...], str | None] = {}
    for row in rows:
        if row.cell in scored:
            # The first row decides, which is undefended where one is.
            victims.setdefault(_place(row), _median_victim(scored[row.cell]))
    plates: dict[str, Plate] = {}
    pixels, omitted = 0, 0
    for row in sorted(rows, key=lambda row: not row.strongest):
        if row.cell not in scored:
            continue
        if pixels >= PIXELS:
            omitted += 1
            continue
        try:
            plate = _plate(scored[row.cell], victims[_place(row)])
        # A picture that cannot be read costs its own place and not the page.
        except FedsimError as error:
            plate = Plate(pairs=[], problem=str(error)[:_LONGEST])
        # The first plate has room whatever its size: a page without a picture shows nothing.
        if pixels and pixels + plate.pixels > PIXELS:
            omitted += 1
            continue
        pixels += plate.pixels
        plates[row.cell] = plate
    return plates, omitted


def _place(row: LeaderboardRow) -> tuple[object, ...]:
    return (row.comparison, row.batch_size, row.round)


def scored_trials(runs: Iterable[StoredRun]) -> dict[str, list[Trial]]:
    """Returns `ResultRow.cell` -> the cell's trials with scored images, by ascending PSNR."""
    found: dict[str, list[tuple[float, ResultRow, Path]]] = {}
    for run in runs:
        for row in run.rows:
            value = row.metrics["psnr"] if row.main.pictured and row.ok and row.metrics else None
            if value is not None and (path := reconstruction_file(run.folder, row)):
                found.setdefault(row.cell, []).append((value, row, path))
    return {
        cell: [(row, path) for _, row, path in sorted(trials, key=lambda entry: entry[0])]
        for cell, trials in found.items()
    }


def _median(values: Sequence[_Value]) -> _Value:
    return values[(len(values) - 1) // 2]


def _median_victim(scored: Sequence[Trial]) -> str | None:
    """Returns the digest of the median image of the median trial; None if its row states none."""
    row, _ = _median(scored)
    values = (row.per_image or {}).get("psnr") or []
    if not row.victims or len(values) != len(row.victims):
        return row.victims[0] if row.victims else None
    order = sorted(range(len(values)), key=lambda at: values[at])
    return row.victims[_median(order)]


def _plate(scored: Sequence[Trial], victim: str | None) -> Plate:
    """Returns the plate of the trial that attacked `victim`, or of the median one.

    Raises:
        FedsimError: the reconstruction is damaged.
    """
    with_victim = [entry for entry in scored if victim in (entry[0].victims or [])]
    row, path = _median(with_victim or scored)
    tensors = read_tensors(path)
    if not {"truth", "reconstruction"} <= tensors.keys():
        raise ReportError(f"{path}: holds no pair of truth and reconstruction")
    truth, reconstruction = tensors["truth"], tensors["reconstruction"]
    first = (row.victims or []).index(victim) if with_victim and victim else 0
    if first >= len(truth):
        raise ReportError(f"{path}: holds {len(truth)} images where its row names {first + 1}")
    # The victim comes first, so that plates of several defenses begin with the same image.
    order = [first, *(at for at in range(len(truth)) if at != first)][:_PAIRS]
    both = _as_bytes(truth[order], reconstruction[order])
    values = psnr(reconstruction[order], truth[order]).tolist()
    height, width = truth.shape[-2:]
    factor = enlargement(height, width)
    return Plate(
        pairs=[
            Pair(pixels=(before, after), psnr=value)
            for before, after, value in zip(*both, values, strict=True)
        ],
        hidden=len(truth) - len(order),
        width=width * factor,
        height=height * factor,
        pixels=2 * len(order) * width * height,
    )


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


def _uri(image: Tensor) -> str:
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode()


def encode_png(image: Tensor) -> bytes:
    """Returns a (H, W, C) uint8 image on the CPU, C = 1 or 3, as the bytes of a PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image.squeeze(2).numpy()).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
