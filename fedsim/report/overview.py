"""Draws one picture of a run, or of a sweep: the same images behind every defense."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsim.recording.files import read_tensors, write_bytes
from fedsim.report.figures import describe_variant
from fedsim.report.paired import over_other
from fedsim.report.pictures import reconstruction_file
from fedsim.report.threat import ThreatModel, threat_model_of
from fedsim.results.lines import ResultRow
from fedsim.results.reading import StoredRun, load_runs
from fedsim.scoring import psnr, summarize
from fedsim.types import watcher_of
from fedsim.words import number_of, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OVERVIEW = "overview.png"

_MOST = 3
"""Largest number of images of a round that are chosen."""
_ROWS = 40
"""Largest number of defenses that are drawn."""
_SIDE = 1.0
"""Side of an image in the picture, in inches."""
_LINE = 0.16
"""Inches that a further line of the note takes."""
_LETTERS = 14
"""Letters of the note that fit into an inch."""
_NAME = 24
"""Letters of a name that fit into a line beside the images."""


@dataclass(frozen=True, kw_only=True)
class Victim:
    """One true image, and the PSNR that the strongest attack on the first stack reached."""

    round: int
    client: int
    """Negative if it was attacked in a sum of several clients' updates."""
    image: Tensor
    """(C, H, W) pixels in [0, 1]."""
    psnr: float
    of: int
    """Number of images of that round among which it was chosen."""


@dataclass(frozen=True, kw_only=True)
class DefendedTrials:
    """The trials of the strongest attack on one defense of one run."""

    folder: Path
    variant: str
    """Empty where only one variant is shown."""
    defense: str
    rows: list[ResultRow]


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """The victims, and the defenses that they are shown behind."""

    batch_size: int
    threat: ThreatModel
    """The threat model of all its pictures."""
    victims: list[Victim]
    defenses: list[DefendedTrials]


def save_overview(folder: Path) -> Path | None:
    """Writes `overview.png` into the folder of a run or of a sweep: victims as columns, defenses as
    rows, of a sweep those of every variant.

    `choose_lineup` says which images and attacks are shown. The pixels are the scored ones. A
    defense that none of these images was attacked behind is left out.

    Returns:
        The picture's path; None if no attack recovered an image.

    Raises:
        FedsimError: the folder holds no results, or a file in it is damaged.
    """
    shown = choose_lineup(load_runs([folder]))
    if shown is None:
        return None
    attacked = [
        each for each in shown.defenses if any(find_recovery(each, v) for v in shown.victims)
    ]
    most = max(victim.of for victim in shown.victims)
    note = "all images"
    if most > _MOST:
        note = f"the worst, median and best of up to {number_of(most, 'image')} behind "
        note += shown.defenses[0].defense
    note += f", batch size {shown.batch_size}, {printable(shown.threat.title)}"
    if hidden := len(shown.defenses) - len(attacked[:_ROWS]):
        note += f"; {number_of(hidden, 'row')} without these images or without room"
    write_bytes(folder / OVERVIEW, _draw(replace(shown, defenses=attacked[:_ROWS]), note))
    return folder / OVERVIEW


def choose_lineup(runs: Sequence[StoredRun]) -> Lineup | None:
    """Chooses victims of `runs`, and the strongest attack on each of their defenses.

    Images are of the smallest batch size, in the first and the last attacked round. All images of a
    round are chosen or, of more than `_MOST`, the worst, the median and the best by PSNR of the
    strongest attack on the first stack. Rows are of one threat model, the first in order, and of
    what the server saw or, if it saw nothing, of one other watcher.

    Returns:
        None if no attack recovered an image.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    rows = [(run, row) for run in runs for row in run.rows if _has_image(run.folder, row)]
    if not rows:
        return None
    # No stack is compared with another under another threat model, or as somebody else sees it.
    least = min(threat_model_of(row) for _, row in rows)
    rows = [(run, row) for run, row in rows if threat_model_of(row) == least]
    watchers = {watcher_of(row.vantage) for _, row in rows}
    watcher = "server" if "server" in watchers else min(watchers)
    rows = [(run, row) for run, row in rows if watcher_of(row.vantage) == watcher]
    size = min(row.batch_size for _, row in rows)
    numbers = sorted({row.round for _, row in rows})
    rounds = sorted({numbers[0], numbers[-1]})
    rows = [(run, row) for run, row in rows if row.batch_size == size and row.round in rounds]
    is_sweep = len({describe_variant(row.variant) for _, row in rows}) > 1
    defenses = []
    for run in runs:
        own = [row for of, row in rows if of is run]
        for name in dict.fromkeys(row.defense.name for row in own):
            variant = describe_variant(own[0].variant) if is_sweep else ""
            trials = strongest(own, name)
            defenses.append(
                DefendedTrials(folder=run.folder, variant=variant, defense=name, rows=trials)
            )
    victims = [victim for round in rounds for victim in choose_victims(defenses[0], round)]
    return Lineup(batch_size=size, threat=least, victims=victims, defenses=defenses)


def _has_image(folder: Path, row: ResultRow) -> bool:
    """Whether a reconstruction of images was scored and lies in the run's folder."""
    scored = row.ok and row.metrics is not None and row.metrics["psnr"] is not None
    return row.main.pictured and scored and reconstruction_file(folder, row) is not None


def strongest(rows: Sequence[ResultRow], stack: str) -> list[ResultRow]:
    """Returns the rows of the attack with the highest mean PSNR behind `stack`.

    They are of one vantage and one threat model. Attacks that do better than on another update
    come first: the others draw what they knew.
    """
    by_attack: dict[tuple[str, str, ThreatModel], list[ResultRow]] = {}
    for row in rows:
        if row.defense.name == stack:
            # Of a secure sum the server sees masked parts, too, whose pictures are noise.
            key = (row.attack.label, row.vantage, threat_model_of(row))
            by_attack.setdefault(key, []).append(row)
    return max(by_attack.values(), key=lambda rows: (_is_informed(rows), _mean_psnr(rows)))


def _is_informed(rows: Sequence[ResultRow]) -> bool:
    """Whether the images are better than those made of another update, if that is known."""
    gain = summarize([value for value in over_other(rows, "psnr") if value is not None])
    return _mean_psnr(rows) > 0 if gain is None else gain.certain > 0


def _mean_psnr(rows: Sequence[ResultRow]) -> float:
    return fmean(row.metrics["psnr"] or 0.0 for row in rows if row.metrics)


def _pairs(folder: Path, row: ResultRow) -> tuple[Tensor, Tensor]:
    """Returns truth and reconstruction of a row, each (N, C, H, W)."""
    path = reconstruction_file(folder, row)
    assert path is not None
    tensors = read_tensors(path)
    return tensors["truth"], tensors["reconstruction"]


def choose_victims(trials: DefendedTrials, round: int) -> list[Victim]:
    """Returns all images of a round, or the worst, the median and the best of them by PSNR."""
    rows = [row for row in trials.rows if row.round == round]
    pairs = [(row, *_pairs(trials.folder, row)) for row in rows]
    count = sum(len(truth) for _, truth, _ in pairs)
    victims = [
        Victim(round=round, client=row.client, image=image, psnr=value, of=count)
        for row, truth, images in pairs
        for image, value in zip(truth, psnr(images, truth).tolist(), strict=True)
    ]
    if len(victims) <= _MOST:
        return victims
    victims.sort(key=lambda victim: victim.psnr)
    return [victims[0], victims[(len(victims) - 1) // 2], victims[-1]]


def find_recovery(trials: DefendedTrials, victim: Victim) -> tuple[Tensor, float] | None:
    """Returns what became of `victim`, and its PSNR; None if no trial attacked that image."""
    for row in trials.rows:
        # A sum of several clients' updates is of no one client, and is told by a negative number.
        other_client = min(row.client, victim.client) >= 0 and row.client != victim.client
        if row.round != victim.round or other_client:
            continue
        for image, drawn in zip(*_pairs(trials.folder, row), strict=True):
            if torch.equal(image, victim.image):
                return drawn, float(psnr(drawn[None], image[None]))
    return None


def _draw(shown: Lineup, note: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    victims, defenses = shown.victims, shown.defenses
    height, width = victims[0].image.shape[-2:]
    wide = 1.9 + (_SIDE * width / height + 0.08) * len(victims)
    lines = textwrap.fill(note, int(_LETTERS * wide))
    below = 0.45 + _LINE * lines.count("\n")
    size = (wide, (_SIDE + 0.3) * (len(defenses) + 1) + 0.1 + below)
    with rc_context({"font.size": 9, "text.parse_math": False}):
        figure = Figure(figsize=size, dpi=110)
        axes = figure.subplots(len(defenses) + 1, len(victims), squeeze=False)
        figure.subplots_adjust(
            left=1.75 / size[0],
            right=1 - 0.1 / size[0],
            top=1 - 0.35 / size[1],
            bottom=below / size[1],
            wspace=0.08,
            hspace=0.3,
        )
        for column, victim in enumerate(victims):
            _show(axes[0][column], victim.image)
            if column == 0 or victims[column - 1].round != victim.round:
                axes[0][column].set_title(f"round {victim.round}", fontsize=9, loc="left")
            for row, trials in enumerate(defenses, start=1):
                recovery = find_recovery(trials, victim)
                if recovery is None:
                    axes[row][column].axis("off")
                else:
                    _show(axes[row][column], recovery[0], f"{recovery[1]:.1f} dB")
        names = [
            "\n".join(
                textwrap.wrap(each.variant, _NAME, break_on_hyphens=False)
                + textwrap.wrap(each.defense, _NAME, break_on_hyphens=False)
                + [each.rows[0].attack.label]
            )
            for each in defenses
        ]
        for (first, *_), name in zip(axes, ["truth", *names], strict=True):
            first.text(-0.12, 0.5, name, transform=first.transAxes, ha="right", va="center")
        figure.text(0.15 / size[0], 0.1 / size[1], lines, fontsize=8, color="0.35")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _show(axes: Axes, image: Tensor, caption: str = "") -> None:
    axes.imshow(
        image.permute(1, 2, 0).squeeze(2).numpy(),
        cmap="gray",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(caption, fontsize=8, labelpad=3)
