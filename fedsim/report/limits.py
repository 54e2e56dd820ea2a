"""Whether runs keep to limits, and whether one leaks more than another: for a check before a merge.

What was not measured keeps to no limit: a table that is INVALID, a run that is unfinished or waits
for its truth, and a defense of which nothing is proven are all reported.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from fedsim.report.control import describe_comparison, invalid_reasons
from fedsim.report.facts import unfinished
from fedsim.report.leaderboard import aggregate
from fedsim.report.row import Comparison, LeaderboardRow
from fedsim.report.utility import UtilityRow, utility
from fedsim.results.reading import ReportError, Run, load_runs, measurements
from fedsim.results.threat_model import ThreatModel
from fedsim.words import number_of

Cell = tuple[str, str, str, str, ThreatModel, int, int]
"""(member of a sweep, defense, attack, vantage, threat model, batch size, round)."""


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
        ReportError: a folder holds no results, a defense is in none, no limit is given, or one is
            not finite.
    """
    limits = {"max-psnr": max_psnr, "max-gain": max_gain, "max-epsilon": max_epsilon}
    if not any(limit is not None for limit in limits.values()):
        raise ReportError("no limit is given: use --max-psnr, --max-gain or --max-epsilon")
    for option, limit in limits.items():
        if limit is not None and not math.isfinite(limit):
            raise ReportError(f"--{option}: expected a finite number, got {limit}")
    folders = list(folders)
    runs = load_runs(folders)
    rows = aggregate(measurements(runs))
    known = {row.defense for row in rows}
    if unknown := sorted(set(defenses) - known):
        raise ReportError(
            f"--defense: {unknown[0]} is none of these runs' ({', '.join(sorted(known))})"
        )
    chosen = [row for row in rows if row.defense in defenses or not (defenses or row.undefended)]
    lines = unfinished(runs)
    if not chosen:
        if lines:
            return lines
        raise ReportError("these runs have no defended stack; name one with --defense")
    if max_psnr is not None or max_gain is not None:
        lines += [f"INVALID: {reason}" for reason in invalid_reasons(rows, unended=False)]
    lines += _unmeasured(
        [row for row in chosen if row.ended], max_psnr is not None, max_gain is not None
    )
    for row in chosen:
        lines += _leaks(row, max_psnr, max_gain)
    if max_epsilon is not None:
        names = {row.defense for row in chosen}
        lines += [line for run in runs for line in _unproven(run, names, max_epsilon)]
    return list(dict.fromkeys(lines))


def grown(before: Path | str, after: Path | str) -> list[str]:
    """Returns a line for each attack on a defense that leaks more in `after` than in `before`.

    More is a mean gain beyond the earlier interval (or the best trial, where there is none), or a
    larger ε. What was measured before and is not any more is a line, too.

    Raises:
        ReportError: a folder holds no results, or they have no attack on a defense in common.
    """
    runs, later = load_runs([before]), load_runs([after])
    rows, later_rows = (aggregate(measurements(each)) for each in (runs, later))
    swept = any(len({(r.scenario, r.variant) for r in each}) > 1 for each in (rows, later_rows))
    old, new = ({_cell(row, swept): row for row in each} for each in (rows, later_rows))
    common = [cell for cell in old if cell in new]
    if not common:
        raise ReportError(
            f"{before} and {after} have no attack on a defense in common, so that nothing compares"
        )
    known = invalid_reasons(rows)
    late = unfinished(later)
    lines = [*unfinished(runs), *late]
    lines += [
        f"INVALID: {reason}"
        for reason in invalid_reasons(later_rows, unended=False)
        if reason not in known
    ]
    gone = "not measured yet" if late else "not measured any more"
    lines += [f"{_named(old[cell])}: {gone}" for cell in old if cell not in new]
    for cell in common:
        was, is_ = old[cell].own_gain, new[cell].own_gain
        if was and old[cell].n_ok and not (is_ and new[cell].n_ok):
            lines.append(f"{_named(new[cell])}: {gone}")
        elif was and is_ and is_.mean > _upper(old[cell]):
            lines.append(
                f"{_named(new[cell])}: gain {is_.mean:+.1f} dB, before {was.mean:+.1f} "
                f"({_reach(old[cell])})"
            )
    was_proven, proven = _claims(runs, swept), _claims(later, swept)
    for (member, name), earlier in was_proven.items():
        now = proven.get((member, name), math.inf)
        if now > earlier * (1 + 1e-9):
            of = f"{member}, " if member else ""
            lines.append(f"{of}{name}: ε {now:.4g}, before {earlier:.4g}")
    return lines


def _cell(row: LeaderboardRow, swept: bool) -> Cell:
    member = f"{row.scenario} {row.variant}" if swept else ""
    where = row.vantage, row.threat, row.batch_size, row.round
    return member, row.defense, row.attack, *where


def _claims(runs: Sequence[Run], swept: bool) -> dict[tuple[str, str], float]:
    """Maps (member of a sweep, defense) to the largest ε of its runs."""
    claims: dict[tuple[str, str], float] = {}
    for run in runs:
        for row in utility([run]):
            key = row.variant if swept else "", row.defense
            claims[key] = max(claims.get(key, 0.0), _epsilon(row))
    return claims


def _named(row: LeaderboardRow) -> str:
    seen = "" if row.vantage == "server" else f", {row.vantage}"
    seen += f", {row.variant}" if row.variant else ""
    seen += "" if row.threat.is_default else f", {row.threat.title}"
    return f"{row.defense}, {row.attack}, batch size {row.batch_size}, round {row.round}{seen}"


def _upper(row: LeaderboardRow) -> float:
    """The most that the mean gain may be, as far as the trials tell."""
    gain = row.own_gain
    assert gain is not None
    return gain.max if gain.high is None else gain.high


def _reach(row: LeaderboardRow) -> str:
    """Words `_upper`: the end of the interval, or the trials where there is none."""
    gain = row.own_gain
    assert gain is not None
    if gain.high is not None:
        return f"up to {gain.high:+.1f}"
    trials = number_of(gain.n, "trial" if row.n == row.independent else "independent trial")
    best = f", the best {gain.max:+.1f}" if gain.n > 1 else ""
    return f"{'one' + trials[1:] if gain.n == 1 else trials}, no interval{best}"


def _leaks(row: LeaderboardRow, max_psnr: float | None, max_gain: float | None) -> list[str]:
    lines, best = [], row.worst.get("psnr")
    if max_psnr is not None and best is not None and best > max_psnr:
        lines.append(f"{_named(row)}: an image has {best:.1f} dB, above {max_psnr:g}")
    if max_gain is not None and row.own_gain and _upper(row) > max_gain:
        lines.append(
            f"{_named(row)}: gains {row.own_gain.mean:+.1f} dB ({_reach(row)}), above {max_gain:g}"
        )
    return lines


def _unmeasured(rows: Sequence[LeaderboardRow], psnr: bool, gain: bool) -> list[str]:
    """Returns a line for each defense of a comparison on which no attack yields what is limited."""
    stacks: dict[tuple[Comparison, str], list[LeaderboardRow]] = {}
    for row in rows:
        stacks.setdefault((row.comparison, row.defense), []).append(row)
    lines = []
    for (comparison, defense), members in stacks.items():
        ended = [row for row in members if row.n_ok]
        missing = {
            "PSNR": psnr and all(row.worst.get("psnr") is None for row in ended),
            "gain over guessing and over another update": gain
            and all(row.own_gain is None for row in ended),
        }
        lines += [
            f"{defense} ({describe_comparison(comparison)}): no attack on it has a {what}, and "
            "what is not measured keeps to no limit; results.jsonl says what failed"
            for what, is_missing in missing.items()
            if is_missing
        ]
    return lines


def _unproven(run: Run, names: Collection[str], limit: float) -> list[str]:
    """Returns a line for each of these defenses of a run whose ε is above the limit."""
    claims = {row.defense: row for row in utility([run])}
    lines = []
    for name in dict.fromkeys([*claims, *(row.defense.name for row in run.rows)]):
        if name not in names:
            continue
        claim = claims.get(name)
        if claim is None:
            lines.append(f"{name}: no line of rounds.jsonl states its ε ({run.folder})")
        elif _epsilon(claim) > limit:
            why = f" ({claim.reason})" if claim.reason else ""
            lines.append(f"{name}: ε is {_epsilon(claim):.4g}{why}, above {limit:g}")
    return lines


def _epsilon(row: UtilityRow) -> float:
    return math.inf if row.epsilon is None else row.epsilon
