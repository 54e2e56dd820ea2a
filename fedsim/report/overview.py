"""Draws one picture of a run, or of a sweep: the same images behind every defense."""

from __future__ import annotations

import io
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fedsim.recording.files import write_bytes
from fedsim.report.lineup import MOST, Lineup, lineup, recovered
from fedsim.results.reading import load_runs
from fedsim.words import number_of, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OVERVIEW = "overview.png"

_SIDE = 1.0
"""Side of an image in the picture, in inches."""

_LINE = 0.16
"""Inches that a further line of the note takes."""
_LETTERS = 14
"""Letters of the note that fit into an inch."""

_NAME = 24
"""Letters of a name that fit into a line beside the images."""

_ROWS = 40
"""At most so many defenses are drawn."""


def save_overview(folder: Path) -> Path | None:
    """Writes `overview.png` into the folder of a run or of a sweep: victims as columns, defenses as
    rows, of a sweep those of every variant.

    `fedsim.report.lineup` says which images and attacks are shown. The pixels are the scored ones.
    A defense that none of these images was attacked behind is left out.

    Returns:
        The picture's path; None if no attack recovered an image.

    Raises:
        FedsimError: the folder holds no results, or a file in it is damaged.
    """
    shown = lineup(load_runs([folder]))
    if shown is None:
        return None
    victims = shown.victims
    attacked = [
        behind
        for behind in shown.defenses
        if any(recovered(behind.run, behind.rows, victim) for victim in victims)
    ]
    path = folder / OVERVIEW
    note = (
        "all images"
        if all(victim.of <= MOST for victim in victims)
        else (
            f"the worst, median and best of up to "
            f"{number_of(max(victim.of for victim in victims), 'image')} behind "
            f"{shown.defenses[0].defense}"
        )
    )
    note += f", batch size {shown.batch_size}, {printable(shown.threat.title)}"
    if hidden := len(shown.defenses) - len(attacked[:_ROWS]):
        note += f"; {number_of(hidden, 'row')} without these images or without room"
    drawn = replace(shown, defenses=attacked[:_ROWS])
    write_bytes(path, _draw(drawn, note))
    return path


def _short(text: str) -> list[str]:
    """Wraps a name into lines that fit beside the images."""
    return textwrap.wrap(text, _NAME, break_on_hyphens=False)


def _draw(shown: Lineup, note: str) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    victims, defenses = shown.victims, shown.defenses
    height, width = victims[0].image.shape[-2:]
    across = _SIDE * width / height
    wide = 1.9 + (across + 0.08) * len(victims)
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
            for row, behind in enumerate(defenses, start=1):
                found = recovered(behind.run, behind.rows, victim)
                if found is None:
                    axes[row][column].axis("off")
                else:
                    _show(axes[row][column], found.image, f"{found.psnr:.1f} dB")
        _name(axes[0][0], "truth")
        for row, behind in enumerate(defenses, start=1):
            name = [*_short(behind.variant), *_short(behind.defense), behind.attack]
            _name(axes[row][0], "\n".join(name))
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
