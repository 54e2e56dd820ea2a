"""What the report draws of attacks on rows: recovered against true values, and who was accused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedsim.recording.files import read_tensors
from fedsim.report.leaderboard import LeaderboardRow
from fedsim.report.pictures import reconstruction_file
from fedsim.report.plots import Accused, Cloud
from fedsim.results.reading import ResultRow, Run
from fedsim.scoring import FALSE_POSITIVES

_POINTS = 400
"""Drawn of one release, evenly among its rows and columns."""

_PANELS = 12
"""Drawn of one comparison."""


def clouds(
    lines: Sequence[LeaderboardRow], runs: Sequence[Run], series: Mapping[str, int]
) -> list[Cloud]:
    """Every entry of the rows that an attack recovered, beside its truth: one for each of `lines`.

    Of the trials the median one by PSNR is shown: neither the luckiest nor the worst.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    recovering = [line for line in lines if line.subject == "rows" and line.metrics["row_error"]]
    attacks = {line.attack for line in recovering}
    found = []
    for line in recovering[:_PANELS]:
        files = _files(line, runs)
        scored = sorted(
            (row.metrics["psnr"], path)
            for row, path in files
            if row.metrics and row.metrics["psnr"] is not None
        )
        if not scored:
            continue
        tensors = read_tensors(scored[(len(scored) - 1) // 2][1])
        pairs = torch.stack([tensors["truth_rows"], tensors["rows"]])[:, :, tensors["scored"]]
        truth, recovered = pairs.flatten(1)[:, :: max(1, -(-pairs[0].numel() // _POINTS))].tolist()
        label = f"{line.defense}, B = {line.batch_size}"
        found.append(
            Cloud(
                label=f"{label}, {line.attack}" if len(attacks) > 1 else label,
                series=series[line.defense],
                points=list(zip(truth, recovered, strict=True)),
            )
        )
    return found


def accused(
    lines: Sequence[LeaderboardRow], runs: Sequence[Run], series: Mapping[str, int]
) -> list[Accused]:
    """Of each defense, the rates at which its best attack on membership accuses; over all trials.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    best: dict[str, LeaderboardRow] = {}
    for line in lines:
        if line.membership_gain is None:
            continue
        known = best.get(line.defense)
        if known is None or line.strength[-1] > known.strength[-1]:
            best[line.defense] = line
    found = []
    for line in best.values():
        parts = [read_tensors(path) for _, path in _files(line, runs)]
        parts = [part for part in parts if "membership" in part]
        if not parts:
            continue
        scores = torch.cat([part["membership"] for part in parts])
        members = torch.cat([part["members"] for part in parts])
        limit = line.membership_tpr_limit
        found.append(
            Accused(
                label=line.defense,
                series=series[line.defense],
                rates=_rates(scores, members),
                limit=None if limit is None else (FALSE_POSITIVES, limit),
            )
        )
    return sorted(found, key=lambda one: one.series)


def _rates(scores: Tensor, members: Tensor) -> list[tuple[float, float]]:
    """(false, true) positive rates at every threshold; equal scores are on one side of it."""
    falling = scores.sort(descending=True)
    members = members[falling.indices]
    last = torch.cat([falling.values[1:] != falling.values[:-1], torch.ones(1, dtype=torch.bool)])
    false, true = (
        (part.double().cumsum(0) / part.sum().clamp_min(1))[last].tolist()
        for part in (~members, members)
    )
    return [(0.0, 0.0), *zip(false, true, strict=True)]


def _files(line: LeaderboardRow, runs: Sequence[Run]) -> list[tuple[ResultRow, Path]]:
    return [
        (row, path)
        for run in runs
        for row in run.rows
        if row.cell == line.cell and row.ok and (path := reconstruction_file(run.folder, row))
    ]
