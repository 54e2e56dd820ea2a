"""Reads what a page draws of attacks on rows: recovered values, and who was accused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedsim.recording.files import read_tensors
from fedsim.report.charts import Series
from fedsim.report.pictures import reconstruction_file
from fedsim.report.row import LeaderboardRow
from fedsim.results.lines import ResultRow
from fedsim.results.reading import Run
from fedsim.targets.membership import FALSE_POSITIVES

_POINTS = 400
"""At most so many points are drawn of one release, evenly among its rows and columns."""

_PANELS = 12
"""At most so many panels are drawn of one comparison."""


def clouds(
    lines: Sequence[LeaderboardRow], runs: Sequence[Run], colors: Mapping[str, int]
) -> list[Series]:
    """Returns recovered beside true entries of rows, one cloud per line that recovers rows.

    It shows the median trial by PSNR: neither the luckiest nor the worst.

    Args:
        lines: Of one comparison.
        runs: That the lines are from.
        colors: Defense -> number of its color.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    recovering = [line for line in lines if not line.main.pictured and line.metrics["row_error"]]
    panels = []
    for line in recovering[:_PANELS]:
        scored = sorted(
            (row.metrics["psnr"], path)
            for row, path in _files(line, runs)
            if row.metrics and row.metrics["psnr"] is not None
        )
        if not scored:
            continue
        tensors = read_tensors(scored[(len(scored) - 1) // 2][1])
        pairs = torch.stack([tensors["truth_rows"], tensors["rows"]])[:, :, tensors["scored"]]
        truth, recovered = pairs.flatten(1)[:, :: max(1, -(-pairs[0].numel() // _POINTS))].tolist()
        panels.append(
            Series(
                label=f"{line.attack} on {line.defense}, B = {line.batch_size}",
                color=colors[line.defense],
                points=list(zip(truth, recovered, strict=True)),
            )
        )
    return panels


def accused(
    lines: Sequence[LeaderboardRow], runs: Sequence[Run], colors: Mapping[str, int]
) -> list[Series]:
    """Returns the rates at which the best attack on each defense accuses, over all trials.

    A ring is the largest rate that the claim of the defense allows. Arguments are those of
    `clouds`.

    Raises:
        FedsimError: a reconstruction is damaged.
    """
    best: dict[str, LeaderboardRow] = {}
    telling = [line for line in lines if "membership_auc" in line.gains]
    for line in sorted(telling, key=lambda line: -line.gains["membership_auc"].mean):
        best.setdefault(line.defense, line)
    curves = []
    for line in best.values():
        parts = [read_tensors(path) for _, path in _files(line, runs)]
        parts = [part for part in parts if "membership" in part]
        if not parts:
            continue
        scores = torch.cat([part["membership"] for part in parts])
        members = torch.cat([part["members"] for part in parts])
        limit = line.limits.get("membership_tpr")
        curves.append(
            Series(
                label=line.defense,
                color=colors[line.defense],
                shape="steps",
                points=_rates(scores, members),
                rings=[] if limit is None else [(FALSE_POSITIVES, limit)],
            )
        )
    return sorted(curves, key=lambda curve: curve.color)


def _rates(scores: Tensor, members: Tensor) -> list[tuple[float, float]]:
    """Returns (false, true) positive rates at every threshold; equal scores stay on one side."""
    falling = scores.sort(descending=True)
    members = members[falling.indices]
    last = torch.cat([falling.values[1:] != falling.values[:-1], torch.ones(1, dtype=torch.bool)])
    false, true = (
        (part.double().cumsum(0) / part.sum().clamp_min(1))[last].tolist()
        for part in (~members, members)
    )
    return [(0.0, 0.0), *zip(false, true, strict=True)]


def _files(line: LeaderboardRow, runs: Sequence[Run]) -> list[tuple[ResultRow, Path]]:
    """Returns the successful trials of a line with the paths of their reconstructions."""
    return [
        (row, path)
        for run in runs
        for row in run.rows
        if row.cell == line.cell and row.ok and (path := reconstruction_file(run.folder, row))
    ]
