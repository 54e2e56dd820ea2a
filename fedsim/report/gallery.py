"""Which reconstructions the report shows, and how they are captioned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.recording.files import read_tensors
from fedsim.report.leaderboard import LeaderboardRow
from fedsim.report.pictures import data_uris, enlargement, reconstruction_file
from fedsim.results.reading import ReportError, ResultRow, Run
from fedsim.scoring import psnr

_PAIRS = 8
"""Shown of one batch."""

_PIXELS = 1 << 21
"""Image pixels in one comparison's gallery (a few MB as PNG); more stay in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One image and what was recovered of it, as `data:` addresses."""

    truth: str
    reconstruction: str
    psnr: float


@dataclass(frozen=True, kw_only=True)
class Plate:
    """One attack on one defense: a batch of pairs; none if every trial failed."""

    line: LeaderboardRow
    pairs: list[Pair]
    hidden: int = 0
    """Images of the batch that are not shown."""
    width: int = 0
    height: int = 0
    """Of an image on the page, in CSS pixels: a whole multiple of its own size."""
    pixels: int = 0
    """Held by the pairs."""


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """The plates of one comparison."""

    plates: list[Plate]
    omitted: int
    """Plates left out for size."""


def gallery(lines: Sequence[LeaderboardRow], runs: Sequence[Run]) -> Gallery:
    """A plate for each of `lines` that recovers images, at the last round it was attacked in.

    Of the trials the median one by PSNR is shown: neither the luckiest picture nor the worst.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    trials: dict[str, list[tuple[Path, ResultRow]]] = {}
    for run in runs:
        for row in run.rows:
            trials.setdefault(row.cell, []).append((run.folder, row))
    last: dict[tuple[str, str], int] = {}
    for line in lines:
        name = (line.defense, line.attack)
        last[name] = max(line.round, last.get(name, 0))
    found: list[Plate] = []
    omitted, pixels = 0, 0
    for line in lines:
        if line.round != last[(line.defense, line.attack)] or line.subject != "images":
            continue
        plate = _plate(line, trials[line.cell])
        if plate is None:
            continue
        if found and pixels + plate.pixels > _PIXELS:
            omitted += 1
        else:
            found.append(plate)
            pixels += plate.pixels
    return Gallery(plates=found, omitted=omitted)


def _plate(line: LeaderboardRow, trials: list[tuple[Path, ResultRow]]) -> Plate | None:
    if not line.n_ok:
        return Plate(line=line, pairs=[])
    scored = [
        (row.metrics["psnr"], path)
        for folder, row in trials
        if row.ok and row.metrics and row.metrics["psnr"] is not None
        if (path := reconstruction_file(folder, row))
    ]
    if not scored:
        return None
    _, path = sorted(scored, key=lambda entry: entry[0])[(len(scored) - 1) // 2]
    tensors = read_tensors(path)
    if not {"truth", "reconstruction"} <= tensors.keys():
        raise ReportError(f"{path}: holds no pair of truth and reconstruction")
    truth, found = tensors["truth"], tensors["reconstruction"]
    shown = slice(0, _PAIRS)
    uris = data_uris(truth[shown], found[shown])
    values = psnr(found[shown], truth[shown]).tolist()
    height, width = truth.shape[-2:]
    factor = enlargement(height, width)
    return Plate(
        line=line,
        pairs=[
            Pair(truth=a, reconstruction=b, psnr=value)
            for (a, b), value in zip(uris, values, strict=True)
        ],
        hidden=max(0, len(truth) - _PAIRS),
        width=width * factor,
        height=height * factor,
        pixels=2 * len(uris) * width * height,
    )
