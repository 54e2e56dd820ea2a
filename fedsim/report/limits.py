"""Whether runs keep to limits, and whether one leaks more than another: for a check before a merge.

What was not measured keeps to no limit: a table that is INVALID, a run that is unfinished or waits
for its truth, and a defense of which nothing is proven are all reported.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from pathlib import Path

from fedsim.report.control import invalid_reasons
from fedsim.report.facts import awaited, unfinished
from fedsim.report.leaderboard import leaderboard_rows
from fedsim.report.row import LeaderboardRow
from fedsim.report.utility import UtilityRow, utility
from fedsim.results.reading import ReportError, load_runs

Cell = tuple[str, str, str, str, int, int]
"""(defense, attack, vantage, server, batch size, round)."""


def broken_limits(
    folders: Iterable[Path | str],
    *,
    max_psnr: float | None = None,
    max_gain: float | None = None,
    max_epsilon: float | None = None,
    defenses: Collection[str] = (),
) -> list[str]:
    """Returns a line for each limit that a defense of these runs does not keep to.

    Args:
        folders: Of runs.
        max_psnr: dB that the best image of any attack may have.
        max_gain: dB over guessing and over another update that any attack may gain on average: the
            upper end of the interval counts, or the best trial where there is none.
        max_epsilon: ε of all releases of a run.
        defenses: Names of those that count; by default all but the undefended.

    Raises:
        ReportError: a folder holds no results, a defense is in none, or no limit is given.
    """
    if max_psnr is None and max_gain is None and max_epsilon is None:
        raise ReportError("no limit is given: use --max-psnr, --max-gain or --max-epsilon")
    folders = list(folders)
    runs, rows = load_runs(folders), leaderboard_rows(folders)
    known = {row.defense for row in rows}
    if unknown := sorted(set(defenses) - known):
        raise ReportError(
            f"--defense: {unknown[0]} is none of these runs' ({', '.join(sorted(known))})"
        )
    chosen = [row for row in rows if row.defense in defenses or not (defenses or row.undefended)]
    if not chosen:
        raise ReportError("these runs have no defended stack; name one with --defense")
    lines = [*unfinished(runs), *filter(None, [awaited(runs)])]
    if max_psnr is not None or max_gain is not None:
        lines += [f"INVALID: {reason}" for reason in invalid_reasons(rows)]
    for row in chosen:
        lines += _leaks(row, max_psnr, max_gain)
    names = {row.defense for row in chosen}
    if max_epsilon is not None:
        lines += [
            line
            for row in utility(runs)
            if row.defense in names and (line := _unproven(row, max_epsilon))
        ]
    return lines


def grown(before: Path | str, after: Path | str) -> list[str]:
    """Returns a line for each attack on a defense that leaks more in `after` than in `before`.

    More is a mean gain beyond the earlier interval (or the best trial, where there is none), or a
    larger ε. What was measured before and is not any more is a line, too.

    Raises:
        ReportError: a folder holds no results, or they have no attack on a defense in common.
    """
    old, new = ({_cell(row): row for row in leaderboard_rows([f])} for f in (before, after))
    common = [cell for cell in old if cell in new]
    if not common:
        raise ReportError(
            f"{before} and {after} have no attack on a defense in common, so that nothing compares"
        )
    lines = [f"{_named(old[cell])}: not measured any more" for cell in old if cell not in new]
    for cell in common:
        was, is_ = old[cell].own_gain, new[cell].own_gain
        if was and is_ and is_.mean > _upper(old[cell]):
            lines.append(
                f"{_named(new[cell])}: gain {is_.mean:+.1f} dB, before {was.mean:+.1f} "
                f"(up to {_upper(old[cell]):+.1f})"
            )
    was_proven = {row.defense: row for row in utility(load_runs([before]))}
    for row in utility(load_runs([after])):
        earlier = was_proven.get(row.defense)
        if earlier and _epsilon(row) > _epsilon(earlier) * (1 + 1e-9):
            lines.append(f"{row.defense}: ε {_epsilon(row):.4g}, before {_epsilon(earlier):.4g}")
    return lines


def _cell(row: LeaderboardRow) -> Cell:
    return row.defense, row.attack, row.vantage, row.server, row.batch_size, row.round


def _named(row: LeaderboardRow) -> str:
    seen = "" if row.vantage == "server" else f", {row.vantage}"
    return f"{row.defense}, {row.attack}, batch size {row.batch_size}, round {row.round}{seen}"


def _upper(row: LeaderboardRow) -> float:
    """The most that the mean gain may be, as far as the trials tell."""
    gain = row.own_gain
    assert gain is not None
    return gain.max if gain.high is None else gain.high


def _leaks(row: LeaderboardRow, max_psnr: float | None, max_gain: float | None) -> list[str]:
    lines, best = [], row.worst.get("psnr")
    if max_psnr is not None and best is not None and best > max_psnr:
        lines.append(f"{_named(row)}: an image has {best:.1f} dB, above {max_psnr:g}")
    if max_gain is not None and row.own_gain and _upper(row) > max_gain:
        lines.append(
            f"{_named(row)}: gains {row.own_gain.mean:+.1f} dB (up to {_upper(row):+.1f}), above "
            f"{max_gain:g}"
        )
    return lines


def _unproven(row: UtilityRow, limit: float) -> str | None:
    if _epsilon(row) <= limit:
        return None
    why = f" ({row.reason})" if row.reason else ""
    return f"{row.defense}: ε is {_epsilon(row):.4g}{why}, above {limit:g}"


def _epsilon(row: UtilityRow) -> float:
    return math.inf if row.epsilon is None else row.epsilon
