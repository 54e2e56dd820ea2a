"""Limits that runs keep to or not, and runs that leak more than others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answer_rows import FAILS, PROVEN, WORKS, Lines, changed, controlled, save, trials
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.report import leaderboard_rows
from fedsim.report.limits import broken_limits, grown
from fedsim.results.reading import ReportError

SCENARIO = "name: s\nseed: 7\ndata: {clients: 10}\ndefenses: {none: [], dp: [clip], pruning: [x]}\n"
STATED = {"epsilon": 7.82, "delta": 1e-5, "unit": "client", "relation": "zero_out"}
DP = trials(FAILS, privacy=PROVEN, label_accuracy=0.2)
PRUNED = trials([14.0, 14.4, 13.6, 14.2, 13.8], defense="pruning")
LINES = [*WORKS, *DP, *PRUNED]


def run_of(
    folder: Path, lines: Lines = LINES, scenario: str = SCENARIO, **claims: dict[str, Any]
) -> Path:
    """A run folder of these rows, whose rounds claim that of each defense."""
    stated = {"dp": STATED, "pruning": {"epsilon": "inf"}} | claims
    rounds = [
        {"defense": name, "round": 1, "epsilon": claim.get("epsilon"), "privacy": claim or None}
        for name, claim in stated.items()
    ]
    save(folder, lines, rounds)
    (folder / "scenario.yaml").write_text(scenario)
    (folder / "record.json").write_text(json.dumps({"device": "cpu"}))
    return folder


def of_dp(rows: Lines) -> Lines:
    return [*WORKS, *rows, *PRUNED]


# `fedsim check`.

FAILED = trials([None] * 5, privacy=PROVEN)
ONE_OF_FIVE = [*trials([17.0], privacy=PROVEN), *FAILED[1:]]
LOOK_ALIKES = trials([30.0, 30.1, 30.2, 29.9, 29.8], privacy=PROVEN, label_accuracy=0.2)
LABELS = [
    row | {"metrics": {"label_accuracy": 0.2}}
    for row in trials(FAILS, attack="label_inference", privacy=PROVEN)
]
OTHERS = trials(FAILS, attack="dlg", privacy=PROVEN)
WEAKER = [row | {"attack": row["attack"] | {"parameters": {"iterations": 1}}} for row in DP]
UNSCORED = [row | {"status": "unscored", "metrics": None} for row in DP]


def told(*levels: float) -> Lines:
    """Rows of dp, by whose members told the claim has these p-values."""
    pairs = zip(DP, levels, strict=False)
    return [row | {"theory": {"membership_p": level}} for row, level in pairs]


LIMITS: dict[str, tuple[Lines, dict[str, float], list[str]]] = {
    # Case -> rows, limits, and the first words of each line.
    "no image is above": (LINES, {"max_psnr": 90.0}, []),
    "an image is above": (LINES, {"max_psnr": 5.0}, ["dp, ", "pruning, "]),
    "the interval ends below": (LINES, {"max_gain": 2.6}, []),
    "the interval ends above the mean": (LINES, {"max_gain": 2.2}, ["pruning, "]),
    "one trial has no interval": ([*WORKS, *PRUNED[:1]], {"max_gain": 1.9}, ["dp: ", "pruning, "]),
    "the best of two counts": ([*WORKS, *PRUNED[:2]], {"max_gain": 2.3}, ["dp: ", "pruning, "]),
    "another batch lowers no gain": (
        of_dp(controlled(LOOK_ALIKES, "batch", psnr=29.5)), {"max_gain": 3.0}, ["dp, "]),
    "another client's does": (
        of_dp(controlled(LOOK_ALIKES, "client", psnr=29.5)), {"max_gain": 3.0}, []),
    "the control does not pass": (
        [*trials(FAILS, defense="none"), *DP, *PRUNED], {"max_psnr": 90.0}, ["INVALID: "]),
    "all failed (PSNR)": (of_dp(FAILED), {"max_psnr": 90.0}, ["dp ("]),
    "all failed (gain)": (of_dp(FAILED), {"max_gain": 90.0}, ["dp ("]),
    "labels alone (PSNR)": (of_dp(LABELS), {"max_psnr": 90.0}, ["dp ("]),
    "labels alone (gain)": (of_dp(LABELS), {"max_gain": 90.0}, ["dp ("]),
    "what works was left out": (of_dp(OTHERS), {"max_gain": 90.0}, ["dp ("]),
    "what works failed": (of_dp([*FAILED, *OTHERS]), {"max_psnr": 90.0}, ["dp ("]),
    "a weaker version of it": (of_dp(WEAKER), {"max_gain": 90.0}, ["dp ("]),
    "trials that failed hide no gain": (
        of_dp([*ONE_OF_FIVE, *OTHERS]), {"max_gain": 4.0}, ["dp (", "dp, "]),
    "the truth is elsewhere": (of_dp(UNSCORED), {"max_psnr": 90.0}, ["UNSCORED: ", "dp: "]),
    "what is not proven": (LINES, {"max_epsilon": 8.0}, ["pruning: ε is inf"]),
    "ε is above": (of_dp(DP), {"max_epsilon": 7.8}, ["dp: ε is 7.82, above 7.8", "pruning: "]),
    "what a participant learns": (
        [*changed(LINES, vantage="client", privacy=STATED | {"epsilon": 9.5})],
        {"max_epsilon": 9.0}, ["dp, ", "pruning, ", "pruning: "]),
    "members refute it": (
        of_dp(changed(DP, privacy={"epsilon": 1.0}, metrics={"membership_auc": 0.97},
                      theory={"membership_auc": 0.7311})), {"max_epsilon": 8.0},
        ["dp, ", "pruning: "],
    ),
    "an interval refutes nothing where a corrected p-value does not": (
        of_dp(changed(DP, privacy={"epsilon": 1.0}, metrics={"membership_auc": 0.97},
                      theory={"membership_auc": 0.7311, "membership_p": 0.4})),
        {"max_epsilon": 8.0}, ["pruning: "],
    ),
    "equal scores do": (
        of_dp([row | {"metrics": {"membership_auc": 1.0}, "theory": {"membership_auc": 0.7311}}
               for row in DP]), {"max_epsilon": 8.0}, ["dp, ", "pruning: "],
    ),
    "scattered scores do not": (
        of_dp([row | {"metrics": {"membership_auc": area}, "theory": {"membership_auc": 0.7311}}
               for row, area in zip(DP, [0.5, 0.6, 0.7, 0.8, 0.9], strict=True)]),
        {"max_epsilon": 8.0}, ["pruning: "],
    ),
    "one client of five refutes it": (
        of_dp(told(1, 1, 1, 1, 0.009)), {"max_epsilon": 8.0}, ["dp, ", "pruning: "]),
    "one client alone does": (of_dp(told(0.04)), {"max_epsilon": 8.0}, ["dp, ", "pruning: "]),
    "one of five is as low by chance": (
        of_dp(told(1, 1, 1, 1, 0.02)), {"max_epsilon": 8.0}, ["pruning: "]),
    "attempts of all attacks count": (
        of_dp([*told(1, 1, 1, 1, 0.009),
               *(row | {"attack": OTHERS[0]["attack"]} for row in told(1, 1, 1, 1, 1))]),
        {"max_epsilon": 8.0}, ["pruning: "],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_what_keeps_to_no_limit(case: str, tmp_path: Path) -> None:
    lines, limits, begins = LIMITS[case]
    found = broken_limits([run_of(tmp_path, lines)], **limits)  # type: ignore[arg-type]
    assert len(found) == len(begins), found
    assert all(
        line.startswith(words) for line, words in zip(sorted(found), sorted(begins), strict=True)
    )


CLAIMS: list[tuple[dict[str, Any], int]] = [
    (STATED, 0),
    (STATED | {"relation": "close"}, 1),
    (STATED | {"relation": "relative"}, 1),
    (STATED | {"delta": 1e-3}, 0),
    (STATED | {"delta": 0.5}, 1),
    ({}, 1),  # no line states it
]


@pytest.mark.parametrize(("claim", "count"), CLAIMS)
@pytest.mark.parametrize("vantage", ["server", "client"])
def test_a_claim_that_is_no_proof_keeps_to_no_limit(
    claim: dict[str, Any], count: int, vantage: str, tmp_path: Path
) -> None:
    if vantage == "client":
        seen = {"vantage": "client", "privacy": claim or {"epsilon": "inf"}}
        run = run_of(tmp_path, [row | seen for row in LINES])
    else:
        run = run_of(tmp_path, dp=claim)
    lines = broken_limits([run], max_epsilon=8.0, defenses=["dp"])
    assert len(lines) == count and all(line.startswith("dp") for line in lines)


def test_what_an_audit_refutes_keeps_to_no_limit(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    line = {"defense": "dp", "method": "two_worlds", "delta": 1e-5}
    for audited, count in ((7.0, 0), (9.5, 1)):
        found = {**line, "audited_epsilon": audited, "holds": not count}
        (run / "audit.jsonl").write_text(json.dumps(found) + "\n")
        assert len(broken_limits([run], max_epsilon=8.0, defenses=["dp"])) == count


def test_each_seed_has_to_keep_to_the_limit_of_epsilon(tmp_path: Path) -> None:
    run_of(tmp_path / "1")
    run_of(tmp_path / "2", dp={})
    assert len(broken_limits([tmp_path], max_epsilon=8.0, defenses=["dp"])) == 1


def test_a_run_without_attacks_is_held_to_a_limit_of_epsilon(tmp_path: Path) -> None:
    text = "name: s\nattacks: []\ndefenses: {none: [], dp: [clip], lost: [clip]}\n"
    run = run_of(tmp_path, [], text, pruning=STATED)
    (line,) = broken_limits([run], max_epsilon=8.0, defenses=["dp", "lost"])
    assert line.startswith("lost: "), "of it no ε was stated"
    assert any(line.startswith("dp: ") for line in broken_limits([run], max_psnr=40.0))
    bare = run_of(tmp_path / "bare", [], "name: s\nattacks: []\ndefenses: {none: []}\n")
    (bare / "rounds.jsonl").unlink()
    with pytest.raises(ReportError, match="no defended stack"):
        broken_limits([bare], max_epsilon=8.0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "no limit is given"),
    ({"max_psnr": 1.0, "defenses": ["pruningg"]}, "--defense: pruningg is none of these"),
    *(
        ({f"max_{name}": value}, f"max-{name}: expected a finite number")
        for name in ("psnr", "gain", "epsilon")
        for value in (float("nan"), float("inf"))
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_checks_of_nothing_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=message):
        broken_limits([run_of(tmp_path)], **given)


# `fedsim compare`.

Change = Callable[[Lines], Lines]


def with_metrics(**metrics: float) -> Change:
    return lambda rows: changed(rows, metrics=metrics)


def in_trial(number: int, psnr: float) -> Change:
    return lambda rows: [
        row | {"metrics": row["metrics"] | {"psnr": psnr}} if row["trial"] == number else row
        for row in rows
    ]


def certified(count: int, false: int = 0) -> Change:
    certificate = {"images": 4, "certified": count, "false": false}
    return lambda rows: changed(rows, certificate=certificate)


def same(rows: Lines) -> Lines:
    return rows


def scattered(more: float) -> Change:
    """Trials that scatter by 60 dB, of which the interval tells nothing."""
    return lambda rows: [
        row | {"metrics": {"psnr": 12 + 15 * (row["trial"] - 2) + more}, "control": None}
        for row in rows
    ]


def seen_by_a_participant(**claim: Any) -> Change:
    return lambda rows: changed(rows, vantage="client", privacy=STATED | claim)


GROWN: dict[str, tuple[Change, Change]] = {
    "gain": (same, lambda rows: changed(rows, metrics={"psnr": 14.0})),
    "gain within a wide interval": (scattered(0), scattered(8)),
    "one trial of five": (same, in_trial(4, 37.0)),
    "labels": (with_metrics(label_accuracy=0.2), with_metrics(label_accuracy=1.0)),
    "features": (with_metrics(subspace_error=0.9), with_metrics(subspace_error=0.0)),
    "their direction": (with_metrics(feature_cosine=0.1), with_metrics(feature_cosine=0.99)),
    "members": (with_metrics(membership_auc=0.5), with_metrics(membership_auc=0.94)),
    "structure": (with_metrics(ssim=0.2), with_metrics(ssim=0.85)),
    "a certificate": (certified(0), certified(1)),
    "the first certificates": (same, certified(4)),
    "a false certificate": (certified(2), certified(2, 1)),
    "failures": (same, lambda rows: [*rows[:2], *FAILED[2:]]),
    "all fail": (same, lambda rows: FAILED),
    "what is gone": (same, lambda rows: []),
    "a leak that was not measured": (
        same, lambda rows: [*rows, *trials([52.0] * 5, attack="dlg", privacy=PROVEN, ssim=0.9)]),
    "a leak of what had failed": (
        lambda rows: FAILED, lambda rows: changed(rows, metrics={"psnr": 52.0})),
    "what a participant learns": (
        seen_by_a_participant(epsilon=2.0), seen_by_a_participant(epsilon=9.0)),
    "of another unit": (seen_by_a_participant(), seen_by_a_participant(unit="example")),
    "or of nothing": (seen_by_a_participant(), seen_by_a_participant(epsilon="inf")),
}  # fmt: skip


@pytest.mark.parametrize("case", GROWN)
def test_what_leaks_more_is_told(case: str, tmp_path: Path) -> None:
    was, now = GROWN[case]
    before = run_of(tmp_path / "before", of_dp(was(DP)))
    after = run_of(tmp_path / "after", of_dp(now(DP)))
    lines = grown(before, after)
    assert lines and all(line.startswith("dp, ") for line in lines), lines
    assert grown(before, before) == grown(after, after) == []


def test_what_leaks_no_more_is_not_told(tmp_path: Path) -> None:
    before = run_of(tmp_path / "before")
    weak = trials(FAILS, attack="dlg", privacy=PROVEN)
    assert grown(before, run_of(tmp_path / "new", [*LINES, *weak])) == []
    less = run_of(tmp_path / "less", of_dp(in_trial(4, 6.0)(DP)))
    assert grown(before, less) == []
    look = [controlled(LOOK_ALIKES, of, psnr=29.95) for of in ("client", "batch")]
    runs = [run_of(tmp_path / f"{i}", of_dp(rows)) for i, rows in enumerate(look)]
    assert grown(before, runs[0]) == [] and grown(before, runs[1])


CLAIMED: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"epsilon": 9.5}, True),
    ({"unit": "example"}, True),
    ({"relation": "replace_one"}, True),
    ({"relation": "close", "epsilon": 4.0}, True),
    ({"relation": None}, True),
    ({"delta": 1e-3}, True),
    ({"delta": None}, True),
    ({"delta": 1e-6}, False),
]


@pytest.mark.parametrize(("change", "told"), CLAIMED)
def test_a_claim_of_something_else_is_told(
    change: dict[str, Any], told: bool, tmp_path: Path
) -> None:
    before, after = run_of(tmp_path / "before"), run_of(tmp_path / "after", dp=STATED | change)
    lines = grown(before, after)
    assert bool(lines) == told and all(line.startswith("dp: ") for line in lines)


OTHERWISE: dict[str, Change] = {
    "parameters": lambda rows: changed(rows, attack={"parameters": {"iterations": 1}}),
    "width": lambda rows: changed(rows, model={"parameters": {"width": 8}}),
    "steps": lambda rows: [row | {"training": {"lr": 0.01}} for row in rows],
    "source": lambda rows: changed(rows, dataset="digits"),
    "images": lambda rows: [row | {"victims": [f"{row['trial']} of a ward"]} for row in rows],
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_what_is_measured_otherwise_does_not_compare(case: str, tmp_path: Path) -> None:
    drawn = [row | {"victims": [f"{row['trial']}"]} for row in LINES]
    before = run_of(tmp_path / "before", drawn)
    after = run_of(tmp_path / "after", OTHERWISE[case](drawn))
    assert grown(before, after) and grown(after, before)
    assert grown(after, after) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [("clients: 10", "clients: 100", "data.clients"), ("seed: 7", "seed: 8", None)],
)
def test_another_setting_does_not_compare(
    old: str, new: str, said: str | None, tmp_path: Path
) -> None:
    before = run_of(tmp_path / "before")
    after = run_of(tmp_path / "after", scenario=SCENARIO.replace(old, new))
    lines = grown(before, after)
    assert any(said in line for line in lines) if said else lines == []


def test_other_data_under_one_name_do_not_compare(tmp_path: Path) -> None:
    plan = {"scenario": "s", "variant": {}, "rounds": 0, "lines": 0, "attack_runs": 0}
    runs = [run_of(tmp_path / name) for name in ("one", "other")]
    for run in runs:
        origin = {"resumable": False, "origin": f"data:{run.name}"}
        (run / "plan.json").write_text(json.dumps(plan | origin))
    assert grown(*runs) and grown(runs[0], runs[0]) == []


@pytest.mark.parametrize("member", ["eval", "train"])
def test_every_member_of_a_sweep_is_compared_with_its_own(member: str, tmp_path: Path) -> None:
    for sweep in ("before", "after"):
        for mode in ("eval", "train"):
            leak = changed(DP, metrics={"psnr": 52.0}) if (sweep, mode) == ("after", member) else DP
            rows = [row | {"variant": {"training.mode": mode}} for row in of_dp(leak)]
            run = run_of(tmp_path / sweep / mode, rows)
            record = {"variant": {"training.mode": mode}}
            (run / "record.json").write_text(json.dumps(record))
    lines = grown(tmp_path / "before", tmp_path / "after")
    assert any(f"training.mode={member}: gain" in line for line in lines)
    assert all(f"training.mode={member}" in line for line in lines)


def test_of_two_runs_the_one_that_leaks_is_told(tmp_path: Path) -> None:
    """They have one name; whichever of them is read last hides nothing."""

    def of(name: str, rows: Lines) -> Lines:
        return [row | {"victims": [f"{name} {row['trial']}"]} for row in rows]

    before = run_of(tmp_path / "before", of("one", LINES))
    run_of(tmp_path / "after" / "a", of("one", LINES))
    leaky = of_dp(changed(DP, metrics={"psnr": 52.0}))
    run = run_of(tmp_path / "after" / "b", of("other", leaky))
    for name in ("b", "0"):
        run = run.rename(run.with_name(name))
        lines = grown(before, tmp_path / "after")
        assert any(line.startswith("dp, ") and "gain" in line for line in lines)
    # Each of several is compared with that of its own name.
    for name, whose in (("a", "one"), ("0", "other")):
        run_of(tmp_path / "earlier" / name, of(whose, LINES))
    lines = grown(tmp_path / "earlier", tmp_path / "after")
    assert lines and all(line.startswith("dp, ") and "figures=0" in line for line in lines)


def test_each_threat_model_is_compared_with_its_own(tmp_path: Path) -> None:
    """Rows of attackers that know labels neither hide nor stand for those of others."""
    known = changed(of_dp(changed(DP, metrics={"psnr": 52.0})), knowledge={"labels": "known"})
    before = run_of(tmp_path / "before", [*LINES, *known])
    after = run_of(tmp_path / "after", [*of_dp(changed(DP, metrics={"psnr": 52.0})), *known])
    assert any(line.startswith("dp, ") for line in grown(before, after))
    with pytest.raises(ReportError, match="no attack on a defense in common"):
        grown(run_of(tmp_path / "known", known), run_of(tmp_path / "honest"))


def test_the_status_says_it(tmp_path: Path) -> None:
    folder = str(run_of(tmp_path))

    def status(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(words))
        return done.exit_code, done.output

    assert status("check", folder, "--max-psnr", "90") == (0, "all limits are kept\n")
    code, said = status("check", folder, "--max-epsilon", "1", "--defense", "dp")
    assert (code, said) == (1, "dp: ε is 7.82, above 1\n")
    assert status("check", folder)[0] == 2
    assert status("check", folder, "--max-psnr", "nan")[0] == 2
    assert status("compare", folder, folder)[0] == 0
    rows = {row.defense for row in leaderboard_rows([folder])}
    assert rows == {"none", "dp", "pruning"}
