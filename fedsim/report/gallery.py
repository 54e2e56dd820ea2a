"""Which reconstructions the report shows, and how they are captioned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.recording import read_tensors
from fedsim.report.leaderboard import LeaderboardRow, aggregate
from fedsim.report.pictures import data_uris, enlargement, reconstruction_file
from fedsim.report.runs import ResultRow, Run
from fedsim.scoring import psnr

_PAIRS = 8
"""Shown of one batch."""

_PIXELS = 1 << 21
"""Image pixels in one report (about 5 MB as PNG in base64); more are left to the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One image and what was recovered of it, as `data:` addresses."""

    truth: str
    reconstruction: str
    psnr: float


@dataclass(frozen=True, kw_only=True)
class Plate:
    """One attack on one defense: a batch of pairs, or why there is none."""

    line: LeaderboardRow
    pairs: list[Pair]
    hidden: int
    """Images of the batch that are not shown."""
    trial: str
    """Which trial is shown."""
    width: int
    height: int
    """Of an image on the page, in CSS pixels."""


def plates(runs: Sequence[Run], confidence: float) -> tuple[list[Plate], int]:
    """The plates of one comparison's runs, in the leaderboard's order, and how many are left out.

    Of each attack on each defense the last attacked round is shown, and of its trials the median
    one by PSNR: neither the luckiest nor the worst picture.
    """
    cells: dict[str, list[tuple[Run, ResultRow]]] = {}
    for run in runs:
        for row in run.rows:
            cells.setdefault(row.cell, []).append((run, row))
    lines = {
        key: aggregate([row for _, row in members], confidence=confidence)[0]
        for key, members in cells.items()
    }
    last = {}
    for line in lines.values():
        name = (line.defense, line.attack)
        last[name] = max(line.round, last.get(name, 0))
    ranked = {
        (line.defense, line.attack, line.batch_size, line.labels, line.bn, line.vantage): rank
        for rank, line in enumerate(aggregate([row for run in runs for row in run.rows]))
    }
    found, omitted, pixels = [], 0, 0
    for key, line in sorted(lines.items(), key=lambda item: ranked[_key(item[1])]):
        if line.round != last[(line.defense, line.attack)]:
            continue
        plate = _plate(line, cells[key])
        if plate is None:
            continue
        pixels += len(plate.pairs) * 2 * plate.width * plate.height
        if pixels > _PIXELS and found:
            omitted += 1
        else:
            found.append(plate)
    return found, omitted
