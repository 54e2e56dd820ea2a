"""Chooses the same images behind every defense, so that pictures of defenses can be compared."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from fedsim.recording.files import read_tensors
from fedsim.report.figures import describe_variant
from fedsim.report.paired import over_other
from fedsim.report.pictures import reconstruction_file
from fedsim.report.threat import ThreatModel, threat_model_of
from fedsim.results.lines import ResultRow
from fedsim.results.reading import Run
from fedsim.scoring import psnr, summarize
from fedsim.types import watcher_of

MOST = 3
"""At most so many images of a round are chosen."""


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
class Behind:
    """The strongest attack on one defense of one run, by its trials."""

    run: Run
    variant: str
    """Empty where only one variant is shown."""
    defense: str
    rows: list[ResultRow]

    @property
    def attack(self) -> str:
        """Label of the attack."""
        return self.rows[0].attack.label


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """The victims, and the defenses that they are shown behind."""

    batch_size: int
    threat: ThreatModel
    """Of all its pictures."""
    victims: list[Victim]
    defenses: list[Behind]


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What an attack made of one victim."""

    image: Tensor
    psnr: float
    gain: float | None
    """PSNR above the guess's; None unless the image was attacked alone, beside a guess."""


def lineup(runs: Sequence[Run], cells: Collection[str] | None = None) -> Lineup | None:
    """Chooses victims of `runs`, and the strongest attack on each of their defenses.

    Images are of the smallest batch size, in the first and the last attacked round. All images of a
    round are chosen or, of more than `MOST`, the worst, the median and the best by PSNR of the
    strongest attack on the first stack. An attack is the strongest with the highest mean PSNR, of
    those that do better than on another update. Rows are of one threat model, the first in order,
    and of what the server saw or, if it saw nothing, of one other watcher. `cells` are the only
    ones that rows are of, if they are named.

    Returns:
        None if no attack recovered an image.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    rows = [
        (run, row)
        for run in runs
        for row in run.rows
        if (cells is None or row.cell in cells) and has_image(run, row)
    ]
    if not rows:
        return None
    # No stack is compared with another under another threat model, or as somebody else sees it.
    least = min(threat_model_of(row) for _, row in rows)
    rows = [(run, row) for run, row in rows if threat_model_of(row) == least]
    watchers = {watcher_of(row.vantage) for _, row in rows}
    watcher = "server" if "server" in watchers else min(watchers)
    rows = [(run, row) for run, row in rows if watcher_of(row.vantage) == watcher]
    size = min(row.batch_size for _, row in rows)
    rounds = sorted({row.round for _, row in rows})
    rounds = sorted({rounds[0], rounds[-1]})
    rows = [(run, row) for run, row in rows if row.batch_size == size and row.round in rounds]
    variants = {describe_variant(row.variant) for _, row in rows}
    defenses = []
    for run in runs:
        own = [row for of, row in rows if of is run]
        for name in dict.fromkeys(row.defense.name for row in own):
            trials = strongest(own, name)
            variant = describe_variant(trials[0].variant) if len(variants) > 1 else ""
            defenses.append(Behind(run=run, variant=variant, defense=name, rows=trials))
    first = defenses[0]
    victims = [
        victim
        for round in rounds
        for victim in chosen(first.run, [row for row in first.rows if row.round == round])
    ]
    return Lineup(batch_size=size, threat=least, victims=victims, defenses=defenses)


def has_image(run: Run, row: ResultRow) -> bool:
    """Whether a reconstruction of images was scored and lies in the run's folder."""
    scored = row.ok and row.metrics is not None and row.metrics["psnr"] is not None
    return row.main.pictured and scored and reconstruction_file(run.folder, row) is not None


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


def _pairs(run: Run, row: ResultRow) -> tuple[Tensor, Tensor]:
    """Returns truth and reconstruction of a row, each (N, C, H, W)."""
    path = reconstruction_file(run.folder, row)
    assert path is not None
    tensors = read_tensors(path)
    return tensors["truth"], tensors["reconstruction"]


def chosen(run: Run, rows: Sequence[ResultRow]) -> list[Victim]:
    """Returns all images of `rows`, or the worst, the median and the best of them by PSNR."""
    pairs = [(row, *_pairs(run, row)) for row in rows]
    count = sum(len(truth) for _, truth, _ in pairs)
    victims = [
        Victim(round=row.round, client=row.client, image=image, psnr=value, of=count)
        for row, truth, recovered in pairs
        for image, value in zip(truth, psnr(recovered, truth).tolist(), strict=True)
    ]
    if len(victims) <= MOST:
        return victims
    victims.sort(key=lambda victim: victim.psnr)
    return [victims[0], victims[(len(victims) - 1) // 2], victims[-1]]


def recovered(run: Run, rows: Sequence[ResultRow], victim: Victim) -> Recovered | None:
    """Returns the reconstruction of `victim` and its PSNR; None if no row attacked that image."""
    for row in rows:
        # A sum of several clients' updates is of no one client, and is told by a negative number.
        other_client = min(row.client, victim.client) >= 0 and row.client != victim.client
        if row.round != victim.round or other_client:
            continue
        truth, images = _pairs(run, row)
        for image, reconstruction in zip(truth, images, strict=True):
            if torch.equal(image, victim.image):
                value = float(psnr(reconstruction[None], image[None]))
                guess = row.baseline["psnr"] if row.baseline and len(truth) == 1 else None
                gain = None if guess is None else value - guess
                return Recovered(image=reconstruction, psnr=value, gain=gain)
    return None
