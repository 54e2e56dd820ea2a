"""Draws one picture of a run, or of a sweep: the same images behind every defense."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsim.recording.files import read_tensors, write_bytes
from fedsim.report.leaderboard import aggregate
from fedsim.report.pictures import scored_trials
from fedsim.report.row import LeaderboardRow
from fedsim.results.reading import StoredRun, load_runs, measurements
from fedsim.scoring import psnr
from fedsim.words import number_of, printable

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

OVERVIEW = "overview.png"

_MOST = 3
"""Largest number of images of a round that are chosen."""
_ROWS = 40
"""Largest number of defenses that are drawn."""
_NAME = 24
"""Letters of a name that fit into a line beside the images."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One true image, and what an attack made of it (`image`), with the PSNR of that in dB."""

    round: int
    client: int
    """Number of the client; negative for an image attacked in a sum of clients' updates."""
    truth: Tensor
    """(C, H, W) pixels in [0, 1], as `image`."""
    image: Tensor
    psnr: float

    def is_of(self, victim: Recovery) -> bool:
        """Whether both are of the same image in the same round.

        Two known clients have to be the same, too.
        """
        other_client = min(self.client, victim.client) >= 0 and self.client != victim.client
        same_round = self.round == victim.round and not other_client
        return same_round and torch.equal(self.truth, victim.truth)


@dataclass(frozen=True, kw_only=True)
class ShownDefense:
    """What the strongest attack on a defense recovered; `row` is that attack's."""

    row: LeaderboardRow
    recoveries: list[Recovery]

    def find(self, victim: Recovery) -> Recovery | None:
        """Returns the recovery of the image of `victim`; None if no trial attacked that image."""
        return next((each for each in self.recoveries if each.is_of(victim)), None)


def save_overview(folder: Path) -> Path | None:
    """Writes `overview.png` into the folder of a run or of a sweep.

    Victims are columns, and defenses are rows; a sweep has those of every variant. The pixels are
    the scored ones. A defense that none of these images was attacked behind is left out.

    Returns:
        The picture's path; None if no attack recovered an image.

    Raises:
        FedsimError: the folder holds no results, or a file in it is damaged.
    """
    defenses = choose_defenses(load_runs([folder]))
    if not defenses:
        return None
    victims = choose_victims(defenses[0].recoveries)
    attacked = [each for each in defenses if any(map(each.find, victims))]
    row, count = defenses[0].row, len(defenses[0].recoveries)
    note = "all images"
    if len(victims) < count:
        note = f"the worst, median and best of {number_of(count, 'image')} behind {row.defense}"
    note += f", batch size {row.batch_size}, {printable(row.threat.title)}"
    if hidden := len(defenses) - len(attacked[:_ROWS]):
        note += f"; {number_of(hidden, 'row')} without these images or without room"
    write_bytes(folder / OVERVIEW, _draw(victims, attacked[:_ROWS], note))
    return folder / OVERVIEW


def choose_defenses(runs: Sequence[StoredRun]) -> list[ShownDefense]:
    """Returns the strongest attack on each defense, as the leaderboard ranks those with images.

    The result is empty if no attack recovered an image.
    All are of the smallest batch size, and of the first and the last attacked round. All have the
    threat model and vantage of the first row, so that stacks can be compared.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    trials = scored_trials(runs)
    rows = [row for row in aggregate(measurements(runs)) if trials.get(row.cell)]
    rows = [row for row in rows if row.comparison[-2:] == rows[0].comparison[-2:]]
    rows = [row for row in rows if row.batch_size == min(each.batch_size for each in rows)]
    rounds = {row.round for row in rows}
    rows = [row for row in rows if row.round in (min(rounds), max(rounds))]
    shown: dict[tuple[str, str], ShownDefense] = {}
    for row in rows:
        place = (row.variant, row.defense)
        first = shown.setdefault(place, ShownDefense(row=row, recoveries=[]))
        if (row.attack, row.vantage) == (first.row.attack, first.row.vantage):
            first.recoveries.extend(
                Recovery(round=row.round, client=trial.client, truth=truth, image=image, psnr=value)
                for trial, path in trials[row.cell]
                for truth, image, value in _read_pairs(path)
            )
    return list(shown.values())


def _read_pairs(path: Path) -> list[tuple[Tensor, Tensor, float]]:
    tensors = read_tensors(path)
    truth, images = tensors["truth"], tensors["reconstruction"]
    return list(zip(truth, images, psnr(images, truth).tolist(), strict=True))


def choose_victims(recoveries: Sequence[Recovery]) -> list[Recovery]:
    """Returns the images of each round, by round; of more than three in a round only three.

    These are the worst, the median and the best by PSNR, in this order.
    """
    victims = []
    for round in sorted({each.round for each in recoveries}):
        own = [each for each in recoveries if each.round == round]
        if len(own) > _MOST:
            own.sort(key=lambda each: each.psnr)
            own = [own[0], own[(len(own) - 1) // 2], own[-1]]
        victims += own
    return victims


_INCH = 110
"""Pixels to an inch: sizes below are in inches."""
_SIDE, _LEFT, _GAP, _LINE = 1.0, 1.75, 0.1, 1.3
"""Height of an image; room for names; gap between columns; distance of two rows."""


def _draw(victims: Sequence[Recovery], defenses: Sequence[ShownDefense], note: str) -> bytes:
    """Returns the PNG; Pillow draws it, since matplotlib takes seconds for a dozen small images."""
    from PIL import Image, ImageDraw

    height, width = victims[0].truth.shape[-2:]
    size = round(_INCH * _SIDE * width / height), round(_INCH * _SIDE)
    pitch = size[0] + round(_INCH * _GAP)
    wide = round(_INCH * (_LEFT + _GAP)) + pitch * len(victims)
    wrapped = textwrap.wrap(note, int(14 * wide / _INCH))  # letters that fit into an inch
    high = round(_INCH * (0.55 + _LINE * (len(defenses) + 1) + 0.16 * len(wrapped)))
    picture = Image.new("RGB", (wide, high), "white")
    draw, name_font, small = ImageDraw.Draw(picture), _font(9), _font(8)

    def show(row: int, column: int, image: Tensor, caption: str = "") -> None:
        x, y = round(_INCH * _LEFT) + pitch * column, round(_INCH * (0.35 + _LINE * row))
        levels = (255 * image).round().byte().permute(1, 2, 0).squeeze(2).numpy()
        enlarged = Image.fromarray(levels).resize(size, Image.Resampling.NEAREST)
        picture.paste(enlarged, (x, y))
        draw.rectangle((x, y, x + size[0] - 1, y + size[1] - 1), outline="black")
        draw.text((x + size[0] / 2, y + size[1] + 4), caption, "black", small, "mt")

    names = ["truth"]
    variants = {each.row.variant for each in defenses}
    for row in (each.row for each in defenses):
        parts = [row.variant] * (len(variants) > 1) + [row.defense]
        folded = [textwrap.fill(part, _NAME, break_on_hyphens=False) for part in parts]
        names.append("\n".join([*folded, row.attack]))
    for place, name in enumerate(names):
        middle = _INCH * (_LEFT - 0.12), _INCH * (0.35 + _LINE * place + _SIDE / 2)
        draw.multiline_text(middle, name, "black", name_font, "rm", align="right")
    for column, victim in enumerate(victims):
        show(0, column, victim.truth)
        if column == 0 or victims[column - 1].round != victim.round:
            above = round(_INCH * _LEFT) + pitch * column, _INCH * 0.3
            draw.text(above, f"round {victim.round}", "black", name_font, "ls")
        for place, defense in enumerate(defenses, 1):
            if found := defense.find(victim):
                show(place, column, found.image, f"{found.psnr:.1f} dB")
    foot = 0.15 * _INCH, high - 0.1 * _INCH
    draw.multiline_text(foot, "\n".join(wrapped), "#595959", small, "ld")
    buffer = io.BytesIO()
    picture.save(buffer, format="png")
    return buffer.getvalue()


@cache
def _font(points: int) -> FreeTypeFont:
    """Returns the font that matplotlib has, which knows more scripts than Pillow's own."""
    from PIL import ImageFont

    spec = find_spec("matplotlib")  # found, and not imported
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(file, points * _INCH / 72)
