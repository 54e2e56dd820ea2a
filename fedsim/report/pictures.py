"""Draws truth and reconstruction side by side: scored pixels, enlarged but never rescaled."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsim.recording.files import read_tensors, write_bytes
from fedsim.report.leaderboard import aggregate
from fedsim.report.row import LeaderboardRow
from fedsim.results.lines import ResultRow
from fedsim.results.reading import ReportError, StoredRun, load_runs, measurements
from fedsim.results.record import files_of
from fedsim.scoring import check_pixels, psnr
from fedsim.types import FedsimError
from fedsim.words import number_of, printable

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

_SHOWN_SIDE = 64
"""Images with a shorter side below so many pixels are enlarged by a whole factor."""

_GAP = 2

_PIXELS = 1 << 20
"""The images of a page have at most so many pixels (about 3 MB as PNG)."""

_PAIRS = 4

_LONGEST = 300
"""Why a picture cannot be read is cut behind so many characters."""

_Trial = tuple[ResultRow, Path]
"""A row of results.jsonl, and the file of its reconstruction."""


def _enlargement(height: int, width: int) -> int:
    """Returns the whole factor that enlarges an image's shorter side to 64 pixels or more."""
    return max(1, -(-_SHOWN_SIDE // min(height, width)))


def save_grid(path: Path, truth: Tensor, reconstruction: Tensor) -> None:
    """Writes a PNG: the truths above, each one's reconstruction below it.

    Both are (N, C, H, W) pixels in [0, 1], C = 1 or 3, in the same order. A ReportError says that
    they differ in shape or C, and a ScoringError that a tensor holds no pixels.
    """
    write_bytes(path, encode_png(_grid_of(*_as_bytes(truth, reconstruction))))


def _grid_of(truth: Tensor, reconstruction: Tensor) -> Tensor:
    """Returns one (H', W', C) image: truths above reconstructions, both (N, H, W, C) uint8."""
    factor = _enlargement(*truth.shape[1:3])
    rows = []
    for images in (truth, reconstruction):
        enlarged = images.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        spaced = torch.nn.functional.pad(enlarged, (0, 0, 0, _GAP, 0, _GAP), value=255)
        rows.append(torch.cat(list(spaced), dim=1))
    return torch.cat(rows)[:-_GAP, :-_GAP]


def save_grids(folder: Path) -> int:
    """Writes a PNG (`save_grid`) beside each reconstruction of images in a run; returns how many.

    A damaged reconstruction is a FedsimError.
    """
    count = 0
    for path in files_of(folder, "reconstructions/*/*/*/*.safetensors"):
        tensors = read_tensors(path)
        if "reconstruction" in tensors:
            save_grid(path.with_suffix(".png"), tensors["truth"], tensors["reconstruction"])
            count += 1
    return count


def reconstruction_file(folder: Path, row: ResultRow) -> Path | None:
    """Returns the file of a row's reconstruction in the run's `folder`; None if there is none."""
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
class _Pair:
    """Holds a true image and what an attack made of it, (H, W, C) uint8, and the PSNR in dB."""

    pixels: tuple[Tensor, Tensor]
    psnr: float

    @property
    def truth(self) -> str:
        return _uri(self.pixels[0])

    @property
    def reconstruction(self) -> str:
        return _uri(self.pixels[1])


@dataclass(frozen=True, kw_only=True)
class Plate:
    """Shows one trial of an attack on a defense, with `hidden` further images that are not shown.

    There are no `pairs` if the pictures cannot be read; `problem` then says why.
    """

    pairs: list[_Pair]
    """Up to 4 pairs: `pixels` (truth, reconstruction), each (H, W, C) uint8, and `psnr` in dB."""
    hidden: int = 0
    width: int = 0
    height: int = 0
    """Size of an image on the page, in CSS pixels: a whole multiple of its own."""
    pixels: int = 0
    """Number of all pixels of the pairs, before they are enlarged."""
    problem: str = ""

    def grid(self) -> Tensor:
        """Returns a (H, W, C) uint8 image of one or more `pairs`: truths above, answers below."""
        truths, images = zip(*(pair.pixels for pair in self.pairs), strict=True)
        return _grid_of(torch.stack(truths), torch.stack(images))


def plates_of(
    rows: Sequence[LeaderboardRow], runs: Iterable[StoredRun]
) -> tuple[dict[str, Plate], int]:
    """Returns `LeaderboardRow.cell` -> plate, and the number of plates that have no room.

    Rows without scored images, or without room, are missing. All rows of one comparison, batch size
    and round show the same image first: the median one of the median trial of their first row. The
    strongest get room first, in 2^20 pixels.
    """
    scored = _scored_trials(runs)
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
        if pixels >= _PIXELS:
            omitted += 1
            continue
        try:
            plate = _plate(scored[row.cell], victims[_place(row)])
        # A picture that cannot be read costs its own place and not the page.
        except FedsimError as error:
            plate = Plate(pairs=[], problem=str(error)[:_LONGEST])
        # The first plate has room whatever its size: a page without a picture shows nothing.
        if pixels and pixels + plate.pixels > _PIXELS:
            omitted += 1
            continue
        pixels += plate.pixels
        plates[row.cell] = plate
    return plates, omitted


def _place(row: LeaderboardRow) -> tuple[object, ...]:
    return (row.comparison, row.batch_size, row.round)


def _scored_trials(runs: Iterable[StoredRun]) -> dict[str, list[_Trial]]:
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


def _median_victim(scored: Sequence[_Trial]) -> str | None:
    """Returns the digest of the median image of the median trial; None if its row states none."""
    row, _ = scored[(len(scored) - 1) // 2]
    values = (row.per_image or {}).get("psnr") or []
    if not row.victims or len(values) != len(row.victims):
        return row.victims[0] if row.victims else None
    order = sorted(range(len(values)), key=lambda at: values[at])
    return row.victims[order[(len(order) - 1) // 2]]


def _plate(scored: Sequence[_Trial], victim: str | None) -> Plate:
    """Returns the plate of the trial that attacked `victim`, or of the median one."""
    with_victim = [entry for entry in scored if victim in (entry[0].victims or [])]
    candidates = with_victim or scored
    row, path = candidates[(len(candidates) - 1) // 2]
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
    factor = _enlargement(height, width)
    return Plate(
        pairs=[
            _Pair(pixels=(before, after), psnr=value)
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
    """Returns the bytes of a PNG of `image`, (H, W, C) uint8 on the CPU, C = 1 or 3."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image.squeeze(2).numpy()).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


_OVERVIEW = "overview.png"

_MOST = 3
"""Largest number of images of a round that are chosen."""
_ROWS = 40
_NAME = 24
"""Letters of a name that fit into a line beside the images."""


@dataclass(frozen=True, kw_only=True)
class _Recovery:
    """One true image, and what an attack made of it (`image`), with the PSNR of that in dB."""

    round: int
    client: int  # number of the client; negative for an image attacked in a sum of clients' updates
    truth: Tensor  # (C, H, W) pixels in [0, 1], as `image`
    image: Tensor
    psnr: float

    def is_of(self, victim: _Recovery) -> bool:
        """Whether both are of one image in one round, and not known to be of two clients."""
        other_client = min(self.client, victim.client) >= 0 and self.client != victim.client
        same_round = self.round == victim.round and not other_client
        return same_round and torch.equal(self.truth, victim.truth)


@dataclass(frozen=True, kw_only=True)
class _ShownDefense:
    """What the strongest attack on a defense recovered; `row` is that attack's."""

    row: LeaderboardRow
    recoveries: list[_Recovery]

    def find(self, victim: _Recovery) -> _Recovery | None:
        return next((each for each in self.recoveries if each.is_of(victim)), None)


def save_overview(folder: Path) -> Path | None:
    """Writes `overview.png` of a run or a sweep; returns its path, or None without an image.

    Columns are attacked images of the first and last round, of each at most three: worst, median
    and best. Rows are up to 40 defenses of all variants, at the smallest batch size. A defense that
    none of these images was attacked behind is left out. A FedsimError says that the folder holds
    no results, or that a file in it is damaged.
    """
    defenses = _choose_defenses(load_runs([folder]))
    if not defenses:
        return None
    victims = _choose_victims(defenses[0].recoveries)
    attacked = [each for each in defenses if any(map(each.find, victims))]
    row, count = defenses[0].row, len(defenses[0].recoveries)
    note = "all images"
    if len(victims) < count:
        note = f"the worst, median and best of {number_of(count, 'image')} behind {row.defense}"
    note += f", batch size {row.batch_size}, {printable(row.threat.title)}"
    if hidden := len(defenses) - len(attacked[:_ROWS]):
        note += f"; {number_of(hidden, 'row')} without these images or without room"
    write_bytes(folder / _OVERVIEW, _draw(victims, attacked[:_ROWS], note))
    return folder / _OVERVIEW


def _choose_defenses(runs: Sequence[StoredRun]) -> list[_ShownDefense]:
    """Returns the strongest attack on each defense, as the leaderboard ranks those with images."""
    trials = _scored_trials(runs)
    rows = [row for row in aggregate(measurements(runs)) if trials.get(row.cell)]
    rows = [row for row in rows if row.comparison[-2:] == rows[0].comparison[-2:]]
    rows = [row for row in rows if row.batch_size == min(each.batch_size for each in rows)]
    rounds = {row.round for row in rows}
    rows = [row for row in rows if row.round in (min(rounds), max(rounds))]
    shown: dict[tuple[str, str], _ShownDefense] = {}
    for row in rows:
        place = (row.variant, row.defense)
        first = shown.setdefault(place, _ShownDefense(row=row, recoveries=[]))
        if (row.attack, row.vantage) == (first.row.attack, first.row.vantage):
            first.recoveries.extend(
                _Recovery(
                    round=row.round, client=trial.client, truth=truth, image=image, psnr=value
                )
                for trial, path in trials[row.cell]
                for truth, image, value in _read_pairs(path)
            )
    return list(shown.values())


def _read_pairs(path: Path) -> list[tuple[Tensor, Tensor, float]]:
    tensors = read_tensors(path)
    truth, images = tensors["truth"], tensors["reconstruction"]
    return list(zip(truth, images, psnr(images, truth).tolist(), strict=True))


def _choose_victims(recoveries: Sequence[_Recovery]) -> list[_Recovery]:
    """Returns the images of each round; of more than three the worst, the median and the best."""
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
_SIDE, _LEFT, _APART, _LINE = 1.0, 1.75, 0.1, 1.3
"""Height of an image; room for names; gap between columns; distance of two rows."""


def _draw(victims: Sequence[_Recovery], defenses: Sequence[_ShownDefense], note: str) -> bytes:
    """Returns the PNG; Pillow draws it, since matplotlib takes seconds for a dozen small images."""
    from PIL import Image, ImageDraw

    height, width = victims[0].truth.shape[-2:]
    size = round(_INCH * _SIDE * width / height), round(_INCH * _SIDE)
    pitch = size[0] + round(_INCH * _APART)
    wide = round(_INCH * (_LEFT + _APART)) + pitch * len(victims)
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
