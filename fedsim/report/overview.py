"""One picture of a run: the same images behind every defense."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from fedsim.recording.files import read_tensors, write_bytes
from fedsim.report.paired import over_other
from fedsim.report.pictures import reconstruction_file
from fedsim.results.reading import ResultRow, Run, load_runs
from fedsim.scoring import psnr, summarize
from fedsim.words import number_of

OVERVIEW = "overview.png"

_SHOWN = 3
"""Images of a round."""

_SIDE = 1.0
"""Inches of an image in the picture."""

_LETTERS = 14
"""Of the note below, in an inch."""


@dataclass(frozen=True, kw_only=True)
class _Victim:
    """One true image, and the PSNR that the first stack's strongest attack reached on it."""

    round: int
    image: Tensor
    """(C, H, W) pixels in [0, 1]."""
    psnr: float
    of: int
    """How many images of that round it was chosen from."""


def save_overview(folder: Path) -> Path | None:
    """Write `overview.png` into a run's folder: victims as columns, defenses as rows.

    Images are of the least batch size, in the first and the last round that was attacked. Of a
    round all images are shown or, of more than three, the worst, the median and the best one by
    what the strongest attack made of it behind the first stack. Every row shows these same images
    as its stack's strongest attack (by mean PSNR, of those that do better than on another update)
    recovered them; the pixels are the scored ones.

    Returns:
        The picture's path; None if no attack recovered an image.

    Raises:
        FedsimError: the folder holds no results, or a file in it is damaged.
    """
    (run, *variants) = load_runs([folder])
    rows = [row for row in run.rows if _has_image(run, row)]
    if variants or not rows:
        return None
    least = min(row.batch_size for row in rows)
    rounds = sorted({row.round for row in rows})
    rounds = sorted({rounds[0], rounds[-1]})
    rows = [row for row in rows if row.batch_size == least and row.round in rounds]
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
    write_bytes(path, _draw(run, shown, victims, f"{chosen}, batch size {least}"))
    return path


def _has_image(run: Run, row: ResultRow) -> bool:
    """Whether a reconstruction of images was scored and lies in the run's folder."""
    scored = row.ok and row.metrics is not None and row.metrics["psnr"] is not None
    images = row.subject == "images" and scored
    return images and reconstruction_file(run.folder, row) is not None


def _strongest(rows: Sequence[ResultRow], stack: str) -> list[ResultRow]:
    """The rows of the attack with the highest mean PSNR behind `stack`.

    Of those that do better than on another update, if there is one: others draw what they knew.
    """
    by_attack: dict[str, list[ResultRow]] = {}
    for row in rows:
        if row.defense.name == stack:
            by_attack.setdefault(row.attack.label, []).append(row)
    return max(by_attack.values(), key=lambda own: (_sees(own), _mean_psnr(own)))


def _sees(rows: Sequence[ResultRow]) -> bool:
    """Whether images of this update are better than those of another, as far as that is known."""
    known = summarize([value for value in over_other(rows, "psnr") if value is not None])
    return _mean_psnr(rows) > 0 if known is None else known.certain > 0


def _mean_psnr(rows: Sequence[ResultRow]) -> float:
    return fmean(row.metrics["psnr"] or 0.0 for row in rows if row.metrics)


def _pairs(run: Run, row: ResultRow) -> tuple[Tensor, Tensor]:
    """Truth and reconstruction of a row, each (N, C, H, W)."""
    path = reconstruction_file(run.folder, row)
    assert path is not None
    tensors = read_tensors(path)
    return tensors["truth"], tensors["reconstruction"]


def _chosen(run: Run, rows: Sequence[ResultRow]) -> list[_Victim]:
    """All images of `rows`, or the worst, the median and the best of them by PSNR."""
    pairs = [(row.round, *_pairs(run, row)) for row in rows]
    count = sum(len(truth) for _, truth, _ in pairs)
    found = [
        _Victim(round=round, image=image, psnr=value, of=count)
        for round, truth, recovered in pairs
        for image, value in zip(truth, psnr(recovered, truth).tolist(), strict=True)
    ]
    if len(found) <= _SHOWN:
        return found
    found.sort(key=lambda victim: victim.psnr)
    return [found[0], found[(len(found) - 1) // 2], found[-1]]


def _recovered(run: Run, rows: Sequence[ResultRow], victim: _Victim) -> tuple[Tensor, float] | None:
    """What was made of `victim`, and its PSNR; None if no row of its round attacked that image."""
    for row in rows:
        if row.round != victim.round:
            continue
        truth, recovered = _pairs(run, row)
        for image, made in zip(truth, recovered, strict=True):
            if torch.equal(image, victim.image):
                return made, float(psnr(made[None], image[None]))
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
            for at, rows in enumerate(shown.values(), start=1):
                found = _recovered(run, rows, victim)
                if found is None:
                    axes[at][column].axis("off")
                else:
                    _show(axes[at][column], found[0], f"{found[1]:.1f} dB")
        _name(axes[0][0], "truth")
        for at, (stack, rows) in enumerate(shown.items(), start=1):
            _name(axes[at][0], f"{stack}\n{rows[0].attack.label}")
        lines = textwrap.fill(note, int(_LETTERS * size[0]))
        figure.text(0.15 / size[0], 0.1 / size[1], lines, fontsize=8, color="0.35")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _name(axes: object, text: str) -> None:
    """Write a row's name to the left of its first image, wherever that image is shown."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    axes.text(-0.12, 0.5, text, transform=axes.transAxes, ha="right", va="center", fontsize=9)


def _show(axes: object, image: Tensor, caption: str = "") -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
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
