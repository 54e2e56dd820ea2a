"""Whether runs keep to limits, which nothing unmeasured does, and whether one leaks more."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedsim.contracts.target import ranking_targets
from fedsim.report.facts import UtilityRow, unfinished, utility
from fedsim.report.figures import format_metric
from fedsim.report.judge import LARGEST_DELTA, attempt, level_of, works
from fedsim.report.leaderboard import aggregate
from fedsim.report.messages import invalid_reasons
from fedsim.report.row import LeaderboardRow, by_comparison
from fedsim.report.threat import describe_comparison
from fedsim.results.reading import (
    ReportError,
    StoredRun,
    differences,
    leaves_of,
    load_runs,
    measurements,
    name_by_place,
)
from fedsim.scoring import LEAST, METRICS, Summary
from fedsim.words import NO_DIFFERENTIAL_PRIVACY, describe_variant, number_of


def broken_limits(
    folders: Iterable[Path | str],
    *,
    max_psnr: float | None = None,
    max_gain: float | None = None,
    max_epsilon: float | None = None,
    defenses: Collection[str] = (),
) -> list[str]:
    """Returns a line for each limit that a defense of these runs does not keep to.

    What was not measured has a line as well. The list is empty if all limits are kept. A
    ReportError says that a folder holds no results, that none has a defended stack or one of
    `defenses`, that no limit is given, or that one is not finite.

    Args:
        folders: Folders of runs, or that hold folders of runs.
        max_psnr: Largest PSNR, dB, that the best image of any attack may have; None: no limit.
        max_gain: Largest mean gain, dB, of any attack over guessing and over another update. The
            upper end of the interval counts, or the best trial where there is none. None: no limit.
        max_epsilon: Largest ε of all releases of a run. A claim that is no differential privacy,
            has a δ above 0.001 or is refuted keeps to no limit. None: no limit.
        defenses: Names of the defenses that count; by default all but the undefended.
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
    defended = {name for run in runs for name, refs in _stacks(run).items() if refs}
    known = {row.defense for row in rows} | {name for run in runs for name in _stacks(run)}
    if unknown := sorted(set(defenses) - known):
        raise ReportError(
            f"--defense: {unknown[0]} is none of these runs' ({', '.join(sorted(known))})"
        )
    chosen = [row for row in rows if row.defense in defenses or not (defenses or row.undefended)]
    lines = unfinished(runs)
    names = set(defenses) or defended | {row.defense for row in chosen}
    if not names:
        if lines:
            return lines
        raise ReportError("these runs have no defended stack; name one with --defense")
    if max_psnr is not None or max_gain is not None:
        unattacked = sorted(names - {row.defense for row in chosen})
        lines += [f"{name}: no attack on it was measured" for name in unattacked]
        lines += [f"INVALID: {reason}" for reason in invalid_reasons(rows, unended=False)]
        for own in by_comparison([row for row in chosen if row.ended]).values():
            for name in dict.fromkeys(row.defense for row in own):
                members = [row for row in own if row.defense == name]
                lines += _list_unmeasured(members, max_psnr is not None, max_gain is not None)
                lines += _list_untried(members, rows)
    for row in chosen:
        lines += _leaks(row, max_psnr, max_gain)
    if max_epsilon is not None:
        for row in chosen:
            lines += _refuted_by_attack(row)
            if row.vantage == "client" and row.epsilon is not None:
                lines += [
                    f"{_name_row(row)}: {broken}" for broken in _why_not_kept(row, max_epsilon)
                ]
        lines += [line for run in runs for line in _unproven(run, names, max_epsilon)]
    # Several cells may break one limit in the same words.
    return list(dict.fromkeys(lines))


def grown(before: Path | str, after: Path | str) -> list[str]:
    """Returns a line for each thing that leaks more in `after`, or was measured otherwise.

    Both are folders of a run, or of a sweep. A mean leaks more beyond the earlier interval (without
    one, the best trial), or if it grows by as much as counts as a leak. A new leak of a trial or an
    image, more certificates, a larger ε or δ, and an ε of another unit or neighbours are lines,
    too. So are other data, settings or parameters under one name, and what is not measured any
    more. The list is empty if nothing grew. A ReportError says that a folder holds no results, or
    that no attack on a defense is in both.
    """
    runs, later = (
        name_by_place(load_runs([before]), before),
        name_by_place(load_runs([after]), after),
    )
    rows, later_rows = (aggregate(measurements(each)) for each in (runs, later))
    pairs = _partners({*map(_member, rows)}, {*map(_member, later_rows)})
    matched = []
    for old in rows:
        alike = [
            new
            for new in later_rows
            if _names(new) == _names(old) and (_member(old), _member(new)) in pairs
        ]
        # Two attacks of one label are each compared with themselves, where that is there.
        same = [new for new in alike if attempt(new, summed=False) == attempt(old, summed=False)]
        matched += [(old, new) for new in same or alike]
    if not matched:
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
    measured = [old for old, _ in matched]
    lines += [f"{_name_row(old)}: {gone}" for old in rows if old not in measured]
    of_runs = _partners({*map(_member, runs)}, {*map(_member, later)})
    for run, other in ((r, o) for r in runs for o in later):
        if (_member(run), _member(other)) in of_runs:
            lines += _other_setting(run, other)
    for old, new in matched:
        lines += _other_attack(old, new) + _more(old, new, gone)
        if old.vantage == "client" and old.epsilon is not None:
            # What a participant learns has an ε of its own, which no line of rounds states.
            lines += _weaker(_name_row(new), [old], [new])
    fresh = [new for new in later_rows if all(new is not each or not o.n_ok for o, each in matched)]
    lines += [
        f"{_name_row(new)}: leaks, and was not measured before"
        for new in fresh
        if _shows(new, later_rows)
    ]
    claims, now = _claims(runs), _claims(later)
    for was, member in sorted(of_runs):
        of = f"{member}, " if len(now) > 1 else ""
        for name, earlier in claims.get(was, {}).items():
            lines += _weaker(f"{of}{name}", earlier, now.get(member, {}).get(name, []))
    return list(dict.fromkeys(lines))


def _member(of: LeaderboardRow | StoredRun) -> str:
    if isinstance(of, StoredRun):
        return f"{of.name} {describe_variant(of.variant)}"
    return f"{of.scenario} {of.variant}"


def _partners(old: Collection[str], new: Collection[str]) -> set[tuple[str, str]]:
    """Returns which members are compared: those of one name, and with the only one all others."""
    return {
        (one, other)
        for one in old
        for other in new
        if one == other or (1 in (len(old), len(new)) and one not in new and other not in old)
    }


def _names(row: LeaderboardRow) -> tuple[object, ...]:
    return row.defense, row.attack, row.vantage, row.threat, row.batch_size, row.round


def _other_setting(old: StoredRun, new: StoredRun) -> list[str]:
    """Returns a line for each setting in which the runs differ, and one if their data do."""
    before, after = differences([old.scenario, new.scenario], [{}, {}])
    lines = [
        f"{new.name}: {key} is {after.get(key)}, before {before.get(key)}, so that nothing compares"
        for key in dict.fromkeys([*before, *after])
        if not key.startswith("defenses.")
    ]
    data = [run.origin for run in (old, new) if run.origin.startswith("data:")]
    if len(set(data)) > 1:
        lines.append(f"{new.name}: the data are others than before, so that nothing compares")
    elif len(data) < 2 and (others := _other_victims(old, new)):
        what = number_of(others, "trial")
        lines.append(f"{new.name}: {what} on other data than before, so that nothing compares")
    return lines


def _other_victims(old: StoredRun, new: StoredRun) -> int:
    """Returns how many trials have other victims; none of nodes, which draw them from a secret."""
    if old.setting("seed") != new.setting("seed"):
        return 0
    if any(run.is_remote for run in (old, new)):
        return 0
    drawn: list[dict[tuple[object, ...], list[str]]] = [
        {
            (r.vantage, r.batch_size, r.round, r.client, r.trial): sorted(r.victims)
            for r in run.rows
            if r.victims is not None
        }
        for run in (old, new)
    ]
    return sum(drawn[1].get(place, victims) != victims for place, victims in drawn[0].items())


def _other_attack(old: LeaderboardRow, new: LeaderboardRow) -> list[str]:
    """Returns a line for each part of what was attacked, and how, that the same names hide."""
    before, after = (json.loads(row.cell) for row in (old, new))
    parts = ["attack", "dataset", "model", "learner", "release", "releases"]
    if old.stack == new.stack:  # defenses may change it
        parts.append("training")
    lines = []
    for part in parts:
        was, now = (dict(leaves_of({part: cell.get(part)})) for cell in (before, after))
        lines += [
            f"{new.attack if part == 'attack' else new.scenario}: {key} is {now.get(key)}, before "
            f"{was.get(key)}, so that nothing compares"
            for key in dict.fromkeys([*was, *now])
            if was.get(key) != now.get(key)
        ]
    return lines


def _more(old: LeaderboardRow, new: LeaderboardRow, gone: str) -> list[str]:
    if not old.n_ok:
        return []
    lines = []
    named = _name_row(new)
    missing = not new.n_ok
    gain, before = _limited_gain(new), _limited_gain(old)
    if before and gain and new.n_ok:
        was, is_ = before.mean, gain.mean
        if is_ > _upper(old) + _UNSEEN or is_ - was >= new.main.leaks:
            lines.append(f"{named}: gain {is_:+.1f} dB, before {was:+.1f} ({_reach(old)})")
        elif new.exposed and not old.exposed:
            lines.append(
                f"{named}: gain {is_:+.1f} dB, at best {gain.max:+.1f}, before {was:+.1f}, "
                f"at best {before.max:+.1f}"
            )
    for name, metric in METRICS.items():
        value, earlier = new.metrics.get(name), old.metrics.get(name)
        missing |= bool(earlier and not value)
        if not (value and earlier and new.n_ok and metric.heading):
            continue
        # PSNR was compared above, by its gain.
        if name == "psnr" and old.own_gain and new.own_gain:
            continue
        growth = metric.gain(value.mean, earlier.mean)
        end = earlier.high if metric.larger_leaks else earlier.low
        best = earlier.max if metric.larger_leaks else earlier.min
        beyond = metric.gain(value.mean, best if end is None else end)
        # A growth that rounds away would be a line with the same figure twice.
        unseen = 0.5 * 10.0 ** -(2 if metric.shown_as == "percent" else metric.digits)
        target = ranking_targets().get(name)
        margin = target.leaks if target and target.ranks_by != "mean" else _MARGIN
        if (beyond > 0 and growth > unseen) or growth >= margin:
            lines.append(
                f"{named}: {metric.heading} {format_metric(value, metric)}, before "
                f"{format_metric(earlier, metric)}"
            )
    missing |= bool(old.own_gain and not new.own_gain)
    lost, lost_before = new.n - new.n_ok, old.n - old.n_ok
    if missing:
        lines.append(f"{named}: {gone}")
    # Shares of failed trials, multiplied out: numbers of trials may differ.
    elif lost * old.n > lost_before * new.n:
        lines.append(f"{named}: {lost} of {number_of(new.n, 'trial')} failed, before {lost_before}")
    return lines + _more_certain(old, new)


_MARGIN = 0.1
"""A mean leaks more if it grew by as much, where no target says otherwise."""

_UNSEEN = 0.05
"""Decibels that no table shows."""


def _more_certain(old: LeaderboardRow, new: LeaderboardRow) -> list[str]:
    """Returns a line if the attacker knows of more images that they are right, or is wrong more."""
    was, is_ = old.certificates, new.certificates
    if is_ is None:
        return []
    lines = []
    for what in ("certified", "false"):
        count, earlier = getattr(is_, what) or 0, (was and getattr(was, what)) or 0
        total = was.images if was else 1
        if count * total > earlier * is_.images:
            lines.append(
                f"{_name_row(new)}: certificates, {what}: {count} of "
                f"{number_of(is_.images, 'image')}, before {earlier} of {total if was else 0}"
            )
    return lines


def _shows(row: LeaderboardRow, rows: Sequence[LeaderboardRow]) -> bool:
    key = (row.comparison, row.defense)
    known = row.certificates and row.certificates.certified
    return bool(known) or works(row, [r for r in rows if (r.comparison, r.defense) == key])


_Claim = UtilityRow | LeaderboardRow


def _weaker(name: str, earlier: Sequence[_Claim], later: Sequence[_Claim]) -> list[str]:
    """Returns a line if ε or δ is larger than before, and for each stated term that is another."""
    was, now = max(map(_epsilon, earlier)), max(map(_epsilon, later), default=math.inf)
    lines = [f"{name}: ε {now:.4g}, before {was:.4g}"] if now > was * (1 + 1e-9) else []
    if math.isinf(max(was, now)):
        return lines
    for term in ("unit", "relation", "delta"):
        stated = {value for c in earlier if (value := getattr(c, term)) is not None}
        for value in dict.fromkeys(getattr(claim, term) for claim in later):
            less = term == "delta" and value is not None and value <= max(stated, default=1)
            if stated and value not in stated and not less:
                was_stated = ", ".join(map(str, sorted(stated)))
                lines.append(
                    f"{name}: claims something else: {term} is {value}, before {was_stated}"
                )
    return lines


def _claims(runs: Sequence[StoredRun]) -> dict[str, dict[str, list[UtilityRow]]]:
    claims: dict[str, dict[str, list[UtilityRow]]] = {}
    for run in runs:
        own = claims.setdefault(_member(run), {})
        for row in utility([run]):
            own.setdefault(row.defense, []).append(row)
    return claims


def _name_row(row: LeaderboardRow) -> str:
    seen = "" if row.vantage == "server" else f", {row.vantage}"
    seen += f", {row.variant}" if row.variant else ""
    seen += "" if row.threat.is_default else f", {row.threat.title}"
    return f"{row.defense}, {row.attack}, batch size {row.batch_size}, round {row.round}{seen}"


def _limited_gain(row: LeaderboardRow) -> Summary | None:
    """Returns the gain that is limited: all of it where no control tells which part is due."""
    return row.gain if row.uncontrolled else row.due


def _upper(row: LeaderboardRow) -> float:
    """The most that the mean gain may be, as far as the trials tell."""
    gain = _limited_gain(row)
    assert gain is not None
    return gain.max if gain.high is None else gain.high


def _reach(row: LeaderboardRow) -> str:
    """Words `_upper`: the end of the interval, or the trials where there is none."""
    gain = _limited_gain(row)
    assert gain is not None
    if gain.high is not None:
        return f"up to {gain.high:+.1f}"
    trials = number_of(gain.n, "trial" if row.n == row.independent else "independent trial")
    best = f", the best {gain.max:+.1f}" if gain.n > 1 else ""
    return f"{'one' + trials[1:] if gain.n == 1 else trials}, no interval{best}"


def _leaks(row: LeaderboardRow, max_psnr: float | None, max_gain: float | None) -> list[str]:
    lines, best = [], row.worst.get("psnr")
    if max_psnr is not None and best is not None and best > max_psnr:
        lines.append(f"{_name_row(row)}: an image has {best:.1f} dB, above {max_psnr:g}")
    gain = _limited_gain(row)
    if max_gain is not None and gain:
        # Failed trials count as gains of 0, so that without them the mean is more.
        most = max(_upper(row), gain.max if row.n_ok < row.n else -math.inf)
        if most > max_gain:
            gains = f"gains {gain.mean:+.1f} dB ({_reach(row)})"
            one = f", at best {gain.max:+.1f}" if most > _upper(row) else ""
            lines.append(f"{_name_row(row)}: {gains}{one}, above {max_gain:g}")
    return lines


def _list_untried(members: Sequence[LeaderboardRow], rows: Sequence[LeaderboardRow]) -> list[str]:
    """Returns a line for each attack that works undefended and was not measured on a defense."""
    if not any(row.n_ok and row.gain for row in members):
        return []
    bare = [row for row in rows if row.comparison == members[0].comparison and row.undefended]
    summed = any(row.vantage == "aggregate" for row in members)
    lines = []
    for row in bare:
        if level_of(row, bare) not in ("leak", "partial"):
            continue
        tried = attempt(row, summed)
        same = [each for each in members if not each.masked and attempt(each, summed) == tried]
        trials, ok = sum(each.n for each in same), sum(each.n_ok for each in same)
        if 2 * ok < max(trials, 1):
            failed = f"failed in {trials - ok} of {number_of(trials, 'trial')}"
            lines.append(
                f"{_name_stack(members)}: {row.attack}, batch size {row.batch_size}, round "
                f"{row.round}, works undefended and {failed if same else 'was left out'}, and "
                f"{_KEEPS_NOTHING}"
            )
    return lines


_KEEPS_NOTHING = "what is not measured keeps to no limit"


def _name_stack(members: Sequence[LeaderboardRow]) -> str:
    return f"{members[0].defense} ({describe_comparison(members[0].comparison)})"


def _list_unmeasured(members: Sequence[LeaderboardRow], psnr: bool, gain: bool) -> list[str]:
    ended = [row for row in members if row.n_ok]
    missing = {
        "PSNR": psnr and all(row.worst.get("psnr") is None for row in ended),
        "gain over guessing and over another update": gain
        and all(row.own_gain is None for row in ended),
    }
    return [
        f"{_name_stack(members)}: no attack on it has a {what}, and {_KEEPS_NOTHING}; "
        "results.jsonl says what failed"
        for what, is_missing in missing.items()
        if is_missing
    ]


def _stacks(run: StoredRun) -> dict[str, list[Any]]:
    return run.setting("defenses") or {}


def _refuted_by_attack(row: LeaderboardRow) -> list[str]:
    lines = []
    for name in ("membership_auc", "membership_tpr") if row.membership_p is None else ():
        found, most = row.metrics[name], row.limit(name)
        if not found or most is None or found.n < LEAST:
            continue
        least = found.min if found.low is None else found.low
        if least > most:
            lines.append(
                f"{_name_row(row)}: {name} of {least:.3g} or more refutes the ε of the release, "
                f"which allows {most:.3g}"
            )
    if row.is_refuted_by_members:
        lines.append(
            f"{_name_row(row)}: the members told of one client refute the ε of all rounds seen "
            f"(p = {row.membership_p:.2g} after correction for all attempts)"
        )
    return lines


def _unproven(run: StoredRun, names: Collection[str], limit: float) -> list[str]:
    """Returns a line for each of these defenses of a run whose ε is no proof of the limit."""
    claims = {row.defense: row for row in utility([run])}
    lines = []
    for name in dict.fromkeys([*claims, *_stacks(run), *(row.defense.name for row in run.rows)]):
        if name not in names:
            continue
        claim = claims.get(name)
        if claim is None:
            lines.append(f"{name}: no line of rounds.jsonl states its ε ({run.folder})")
        elif broken := _why_not_kept(claim, limit):
            lines += [f"{name}: {words}" for words in broken]
        elif claim.audited_epsilon is not None and claim.audited_epsilon > _epsilon(claim):
            lines.append(
                f"{name}: ε is {_epsilon(claim):.4g}, and the audit shows "
                f"{claim.audited_epsilon:.4g}, which refutes it"
            )
    return lines


def _why_not_kept(claim: _Claim, limit: float) -> list[str]:
    """Words why a claim keeps to no limit of ε, or not to this one; empty if it does."""
    epsilon = f"ε is {_epsilon(claim):.4g}"
    if _epsilon(claim) > limit:
        reason = claim.reason if isinstance(claim, UtilityRow) else claim.privacy_reason
        return [f"{epsilon}{f' ({reason})' if reason else ''}, above {limit:g}"]
    if claim.relation in NO_DIFFERENTIAL_PRIVACY:
        return [
            f"{epsilon} of neighbours that are {claim.relation}, which is no differential privacy "
            "and keeps to no limit"
        ]
    if claim.delta is not None and claim.delta > LARGEST_DELTA:
        return [
            f"{epsilon} at a δ of {claim.delta:g}, and above {LARGEST_DELTA:g} keeps to no limit"
        ]
    return []


def _epsilon(row: _Claim) -> float:
    return math.inf if row.epsilon is None else row.epsilon
