"""Draws one picture of a run: the same images behind every defense."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsim.recording.files import read_tensors, write_bytes
from fedsim.report.paired import over_other
from fedsim.report.pictures import reconstruction_file
from fedsim.results.lines import ResultRow
from fedsim.results.reading import Run, load_runs
from fedsim.scoring import psnr, summarize
from fedsim.types import watcher_of
from fedsim.words import number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OVERVIEW = "overview.png"

_SHOWN = 3
"""At most so many images of a round are drawn."""

_SIDE = 1.0
"""Side of an image in the picture, in inches."""

_LETTERS = 14
"""Letters of the note that fit into an inch."""


@dataclass(frozen=True, kw_only=True)
class _Victim:
    """One true image, and the PSNR that the strongest attack on the first stack reached."""

    round: int
    image: Tensor
    """(C, H, W) pixels in [0, 1]."""
    psnr: float
    of: int
    """Number of images of that round among which it was chosen."""


def save_overview(folder: Path) -> Path | None:
    """Writes `overview.png` into a run's folder: victims as columns, defenses as rows.

    Images are of the smallest batch size, in the first and the last attacked round. All images of a
    round are shown or, of more than three, the worst, the median and the best by PSNR of the
    strongest attack on the first stack. Each row shows these images as its stack's strongest attack
    recovered them: that with the highest mean PSNR, of those that do better than on another update.
    They show what the server saw or, if it saw nothing, one other watcher. The pixels are the
    scored ones.

    Returns:
        The picture's path; None if no attack recovered an image.

    Raises:
        FedsimError: the folder holds no results, or a file in it is damaged.
    """
    (run, *variants) = load_runs([folder])
    rows = [row for row in run.rows if _has_image(run, row)]
    if variants or not rows:
        return None
    # No stack is compared with another as somebody else sees it.
    watchers = {watcher_of(row.vantage) for row in rows}
    watcher = "server" if "server" in watchers else min(watchers)
    rows = [row for row in rows if watcher_of(row.vantage) == watcher]
    size = min(row.batch_size for row in rows)
    rounds = sorted({row.round for row in rows})
    rounds = sorted({rounds[0], rounds[-1]})
    rows = [row for row in rows if row.batch_size == size and row.round in rounds]
    stacks = list(dict.fromkeys(row.defense.name for row in rows))
    shown = {stack: _strongest(rows, stack) for stack in stacks}
    victims = [
        victim
        for round in rounds
        for victim in _chosen(run, [row for row in shown[stacks[0]] if row.round == round])
    ]
    path = folder / OVERVIEW
    chosen = (
        "all images"
        if all(v.of <= _SHOWN for v in victims)
        else (
            f"the worst, median and best of up to "
            f"{number_of(max(v.of for v in victims), 'image')} behind {stacks[0]}"
        )
    )
    write_bytes(path, _draw(run, shown, victims, f"{chosen}, batch size {size}"))
    return path


def _has_image(run: Run, row: ResultRow) -> bool:
    """Whether a reconstruction of images was scored and lies in the run's folder."""
    scored = row.ok and row.metrics is not None and row.metrics["psnr"] is not None
    images = row.subject == "images" and scored
    return images and reconstruction_file(run.folder, row) is not None


def _strongest(rows: Sequence[ResultRow], stack: str) -> list[ResultRow]:
    """Returns the rows of the attack with the highest mean PSNR behind `stack`.

    Attacks that do better than on another update come first: the others draw what they knew.
    """
    by_attack: dict[str, list[ResultRow]] = {}
    for row in rows:
        if row.defense.name == stack:
            by_attack.setdefault(row.attack.label, []).append(row)
    return max(by_attack.values(), key=lambda rows: (_is_informed(rows), _mean_psnr(rows)))


def _is_informed(rows: Sequence[ResultRow]) -> bool:
    """Whether the images are better than those made of another update, if that is known."""
    gain = summarize([value for value in over_other(rows, "psnr") if value is not None])
    return _mean_psnr(rows) > 0 if gain is None else gain.certain > 0


def _mean_psnr(rows: Sequence[ResultRow]) -> float:
    return fmean(row.metrics["psnr"] or 0.0 for row in rows if row.metrics)


def _pairs(run: Run, row: ResultRow) -> tuple[Tensor, Tensor]:
    """Returns truth and reconstruction of a row, each (N, C, H, W)."""
    path = reconstruction_file(run.folder, row)
    assert path is not None
    tensors = read_tensors(path)
    return tensors["truth"], tensors["reconstruction"]


def _chosen(run: Run, rows: Sequence[ResultRow]) -> list[_Victim]:
    """Returns all images of `rows`, or the worst, the median and the best of them by PSNR."""
    pairs = [(row.round, *_pairs(run, row)) for row in rows]
    count = sum(len(truth) for _, truth, _ in pairs)
    victims = [
        _Victim(round=round, image=image, psnr=value, of=count)
        for round, truth, recovered in pairs
        for image, value in zip(truth, psnr(recovered, truth).tolist(), strict=True)
    ]
    if len(victims) <= _SHOWN:
        return victims
    victims.sort(key=lambda victim: victim.psnr)
    return [victims[0], victims[(len(victims) - 1) // 2], victims[-1]]


def _recovered(run: Run, rows: Sequence[ResultRow], victim: _Victim) -> tuple[Tensor, float] | None:
    """Returns the reconstruction of `victim` and its PSNR; None if no row attacked that image."""
    for row in rows:
        if row.round != victim.round:
            continue
        truth, recovered = _pairs(run, row)
        for image, reconstruction in zip(truth, recovered, strict=True):
            if torch.equal(image, victim.image):
                return reconstruction, float(psnr(reconstruction[None], image[None]))
    return None


def _draw(
    run: Run, shown: dict[str, list[ResultRow]], victims: Sequence[_Victim], note: str
) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    height, width = victims[0].image.shape[-2:]
    across = _SIDE * width / height
    size = (1.9 + (across + 0.08) * len(victims), (_SIDE + 0.3) * (len(shown) + 1) + 0.55)
    with rc_context({"font.size": 9, "text.parse_math": False}):
        figure = Figure(figsize=size, dpi=110)
        axes = figure.subplots(len(shown) + 1, len(victims), squeeze=False)
        figure.subplots_adjust(
            left=1.75 / size[0],
            right=1 - 0.1 / size[0],
            top=1 - 0.35 / size[1],
            bottom=0.45 / size[1],
            wspace=0.08,
            hspace=0.3,
        )
        for column, victim in enumerate(victims):
            _show(axes[0][column], victim.image)
            if column == 0 or victims[column - 1].round != victim.round:
                axes[0][column].set_title(f"round {victim.round}", fontsize=9, loc="left")
            for row, rows in enumerate(shown.values(), start=1):
                recovered = _recovered(run, rows, victim)
                if recovered is None:
                    axes[row][column].axis("off")
                else:
                    _show(axes[row][column], recovered[0], f"{recovered[1]:.1f} dB")
        _name(axes[0][0], "truth")
        for row, (stack, rows) in enumerate(shown.items(), start=1):
            _name(axes[row][0], f"{stack}\n{rows[0].attack.label}")
        lines = textwrap.fill(note, int(_LETTERS * size[0]))
        figure.text(0.15 / size[0], 0.1 / size[1], lines, fontsize=8, color="0.35")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _name(axes: Axes, text: str) -> None:
    """Writes a row's name to the left of its first image."""
    axes.text(-0.12, 0.5, text, transform=axes.transAxes, ha="right", va="center", fontsize=9)


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
