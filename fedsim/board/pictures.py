"""Chooses the reconstructions that the page shows, each image once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsim.board.compact import shortened
from fedsim.report.gallery import plate_of, trials_of
from fedsim.report.row import LeaderboardRow
from fedsim.results.reading import Run
from fedsim.types import FedsimError

PIXELS = 1 << 20
"""The images of a page have at most so many pixels (about 3 MB as PNG)."""

_PAIRS = 4
"""So many images of a batch are shown at most."""


class Album:
    """Holds the images of a page as `data:` addresses, and which of them each row shows."""

    def __init__(self) -> None:
        """Starts without an image."""
        self.addresses: dict[str, int] = {}
        """Each image's address and its number."""
        self.of_row: dict[int, dict[str, Any]] = {}
        """Position of a row -> its images, or why they cannot be shown."""
        self.omitted = 0
        """Number of rows whose images are left out for the size of the page."""

    def number(self, address: str) -> int:
        """Returns the number of an image; equal images get the same one."""
        return self.addresses.setdefault(address, len(self.addresses))


def album(rows: Sequence[LeaderboardRow], runs: Sequence[Run]) -> Album:
    """Returns the images of the median trial of each row, those of the strongest attacks first.

    A row without a readable reconstruction has no image. A damaged file is said so in its place.
    """
    trials, chosen, pixels = trials_of(runs), Album(), 0
    order = sorted(range(len(rows)), key=lambda position: not rows[position].strongest)
    for position in order:
        row = rows[position]
        if row.subject != "images" or row.metrics["psnr"] is None:
            continue
        if pixels >= PIXELS:
            chosen.omitted += 1
            continue
        try:
            plate = plate_of(row, trials[row.cell], _PAIRS)
        except FedsimError as error:
            chosen.of_row[position] = {"problem": shortened(str(error))}
            continue
        if plate is None or not plate.pairs:
            continue
        if pixels and pixels + plate.pixels > PIXELS:
            chosen.omitted += 1
            continue
        pixels += plate.pixels
        chosen.of_row[position] = {
            "pairs": [
                [chosen.number(p.truth), chosen.number(p.reconstruction), round(p.psnr, 1)]
                for p in plate.pairs
            ],
            "hidden": plate.hidden,
            "width": plate.width,
            "height": plate.height,
        }
    return chosen
