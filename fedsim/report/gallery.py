"""Chooses which reconstructions the report shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.recording.files import read_tensors
from fedsim.report.lineup import Lineup, Recovered, Victim, lineup, recovered
from fedsim.report.pictures import data_uris, enlargement, reconstruction_file
from fedsim.report.row import LeaderboardRow
from fedsim.results.lines import ResultRow
from fedsim.results.reading import ReportError, Run
from fedsim.scoring import psnr

_PAIRS = 8
"""The report shows at most so many images of a batch."""

_SIDE = 96
"""Pictures of the same image behind every defense have a shorter side of so many CSS pixels."""

_PIXELS = 1 << 21
"""The images of one comparison have at most so many pixels (a few MB as PNG); the others stay in
the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Holds one image and its reconstruction, as `data:` addresses."""

    truth: str
    reconstruction: str
    psnr: float


@dataclass(frozen=True, kw_only=True)
class Plate:
    """Shows one attack on one defense: a batch of pairs; none if every trial failed."""

    line: LeaderboardRow
    pairs: list[Pair]
    hidden: int = 0
    """Number of images of the batch that are not shown."""
    width: int = 0
    height: int = 0
    """Size of an image on the page, in CSS pixels: a whole multiple of its own."""
    pixels: int = 0
    """Number of pixels that the pairs hold."""


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Holds the plates of one comparison."""

    plates: list[Plate]
    omitted: int
    """Number of plates left out for their size."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Shows what the strongest attack on one defense made of a victim."""

    variant: str
    defense: str
    attack: str
    picture: str | None
    """`data:` address; None if no trial behind this defense recovered the image."""
    psnr: float | None
    gain: float | None


@dataclass(frozen=True, kw_only=True)
class PictureRow:
    """Shows one image of one client, and beside it the same image behind every defense."""

    round: int
    client: int
    batch_size: int
    of: int
    """Number of images of that round among which it was chosen."""
    truth: str
    """`data:` address of the client's own image."""
    width: int
    height: int
    """Size of an image on the page, in CSS pixels: a whole multiple of its own."""
    cells: list[Cell]


def same_images(lines: Sequence[LeaderboardRow], runs: Sequence[Run]) -> list[PictureRow]:
    """Returns a row of pictures for the first and the last attacked round, as `lineup` chooses.

    Of a round's images it is one that is recovered behind most defenses; of several, the nearest to
    the median of what the strongest attack on the first stack recovered.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    shown = lineup(runs, {line.cell for line in lines})
    if shown is None:
        return []
    rows = []
    for round in dict.fromkeys(victim.round for victim in shown.victims):
        victims = sorted((v for v in shown.victims if v.round == round), key=lambda v: v.psnr)
        middle = (len(victims) - 1) // 2
        found = [[recovered(b.run, b.rows, victim) for b in shown.defenses] for victim in victims]
        best = max(
            range(len(victims)),
            key=lambda i: (sum(f is not None for f in found[i]), -abs(i - middle)),
        )
        rows.append(_picture_row(shown, victims[best], found[best]))
    return rows


def _picture_row(shown: Lineup, victim: Victim, found: Sequence[Recovered | None]) -> PictureRow:
    """Returns the row of `victim`; `found` is what was recovered of it behind each defense."""
    height, width = victim.image.shape[-2:]
    factor = enlargement(height, width, _SIDE)
    ((truth, _),) = data_uris(victim.image[None], victim.image[None])
    cells = []
    for behind, picture in zip(shown.defenses, found, strict=True):
        cells.append(
            Cell(
                variant=behind.variant,
                defense=behind.defense,
                attack=behind.attack,
                picture=data_uris(victim.image[None], picture.image[None])[0][1]
                if picture
                else None,
                psnr=picture.psnr if picture else None,
                gain=picture.gain if picture else None,
            )
        )
    return PictureRow(
        round=victim.round,
        client=victim.client,
        batch_size=shown.batch_size,
        of=victim.of,
        truth=truth,
        width=width * factor,
        height=height * factor,
        cells=cells,
    )


def gallery(lines: Sequence[LeaderboardRow], runs: Sequence[Run]) -> Gallery:
    """Returns a plate for each of `lines` that recovers images, at its last attacked round.

    It shows the median trial by PSNR: neither the luckiest picture nor the worst.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    trials = trials_of(runs)
    last: dict[tuple[str, str], int] = {}
    for line in lines:
        name = (line.defense, line.attack)
        last[name] = max(line.round, last.get(name, 0))
    plates: list[Plate] = []
    omitted, pixels = 0, 0
    for line in lines:
        if line.round != last[(line.defense, line.attack)] or line.subject != "images":
            continue
        plate = plate_of(line, trials[line.cell])
        if plate is None:
            continue
        if plates and pixels + plate.pixels > _PIXELS:
            omitted += 1
        else:
            plates.append(plate)
            pixels += plate.pixels
    return Gallery(plates=plates, omitted=omitted)


def trials_of(runs: Sequence[Run]) -> dict[str, list[tuple[Path, ResultRow]]]:
    """Maps each line of the leaderboard, by its cell, to its trials and their runs' folders."""
    trials: dict[str, list[tuple[Path, ResultRow]]] = {}
    for run in runs:
        for row in run.rows:
            trials.setdefault(row.cell, []).append((run.folder, row))
    return trials


def plate_of(
    line: LeaderboardRow, trials: Sequence[tuple[Path, ResultRow]], pairs: int = _PAIRS
) -> Plate | None:
    """Returns the plate of one line with at most so many pairs.

    It is of the median trial by PSNR. None if none of the trials has scored images.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
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
    truth, reconstruction = tensors["truth"], tensors["reconstruction"]
    shown = slice(0, pairs)
    uris = data_uris(truth[shown], reconstruction[shown])
    values = psnr(reconstruction[shown], truth[shown]).tolist()
    height, width = truth.shape[-2:]
    factor = enlargement(height, width)
    return Plate(
        line=line,
        pairs=[
            Pair(truth=a, reconstruction=b, psnr=value)
            for (a, b), value in zip(uris, values, strict=True)
        ],
        hidden=max(0, len(truth) - pairs),
        width=width * factor,
        height=height * factor,
        pixels=2 * len(uris) * width * height,
    )
