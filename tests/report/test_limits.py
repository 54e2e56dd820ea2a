"""Limits that runs keep to or not, and runs that leak more than others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import STACKS, Stack, write_run
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.report import leaderboard_rows
from fedsim.report.limits import broken_limits, grown
from fedsim.results.reading import ReportError

CHOSEN = {name: STACKS[name] for name in ("none", "pruning", "dp")}


def written(folder: Path, **changes: Stack) -> Path:
    return write_run(folder, stacks={**CHOSEN, **changes}, trials=3, batch_sizes=(1,), rounds=3)


def weaker(stack: Stack, through: float, epsilon: float | None = None) -> Stack:
    return Stack(stack.members, through, stack.accuracy, epsilon or stack.epsilon)


def test_limits_hold_of_defended_stacks_or_of_those_that_are_named(run_folder: Path) -> None:
    broken = broken_limits([run_folder], max_psnr=5.0)
    assert {line.partition(",")[0] for line in broken} == {"pruning", "dp"}
    assert all("dB, above 5" in line for line in broken)
    named = broken_limits([run_folder], max_psnr=5.0, defenses=["none"])
    assert {line.partition(",")[0] for line in named} == {"none"}
    assert broken_limits([run_folder], max_psnr=90.0) == []


def test_the_upper_end_of_the_gain_counts(run_folder: Path) -> None:
    """A limit between the mean and the end of its interval is broken."""
    row = next(
        each
        for each in leaderboard_rows([run_folder])
        if each.defense == "pruning" and each.own_gain and each.own_gain.high is not None
    )
    assert row.own_gain and row.own_gain.high is not None
    between = (row.own_gain.mean + row.own_gain.high) / 2
    named = f"pruning, {row.attack}, batch size {row.batch_size}, "
    for limit, is_broken in ((between, True), (row.own_gain.high + 0.1, False)):
        lines = broken_limits([run_folder], max_gain=limit, defenses=["pruning"])
        assert any(line.startswith(named) and "(up to +" in line for line in lines) == is_broken
    assert broken_limits([run_folder], max_gain=60.0) == []


@pytest.mark.parametrize(
    ("trials", "reach"), [(1, "one trial, no interval"), (2, "2 trials, no interval, the best +")]
)
def test_too_few_trials_have_no_upper_end(tmp_path: Path, trials: int, reach: str) -> None:
    run = write_run(tmp_path, stacks=CHOSEN, trials=trials, batch_sizes=(1,))
    (line, *_) = broken_limits([run], max_gain=1.0, defenses=["none"])
    assert f" dB ({reach}" in line and "up to" not in line


def look_alikes(of: str, gain: float) -> Callable[[dict[str, Any]], None]:
    """A gain behind dp that another update of that kind nearly gives, too."""

    def change(row: dict[str, Any]) -> None:
        if row["defense"]["name"] == "dp" and (row["metrics"] or {}).get("psnr") is not None:
            psnr = row["baseline"]["psnr"] + gain + row["trial"] / 10
            row["metrics"]["psnr"] = psnr
            row["control"] = {"of": of, "other_update": {"psnr": psnr - 0.5}}

    return change


@pytest.mark.parametrize(("of", "broken"), [("batch", True), ("client", False)])
def test_another_batch_of_the_client_keeps_no_gain_below_a_limit(
    of: str, broken: bool, tmp_path: Path
) -> None:
    run = altered(written(tmp_path / "run"), look_alikes(of, 18.0))
    lines = broken_limits([run], max_gain=3.0, defenses=["dp"])
    assert any("inverting_gradients" in line for line in lines) == broken
    before = altered(written(tmp_path / "before"), look_alikes(of, 2.0))
    assert any("gain" in line for line in grown(before, run)) == broken


def test_what_is_not_proven_is_above_any_limit(run_folder: Path) -> None:
    broken = broken_limits([run_folder], max_epsilon=8.0)
    assert len(broken) == 1 and broken[0].startswith("pruning: ε is inf")
    (dp,) = broken_limits([run_folder], max_epsilon=7.8, defenses=["dp"])
    assert dp == "dp: ε is 7.82, above 7.8"


def test_a_table_without_a_control_keeps_to_no_limit_of_leakage(tmp_path: Path) -> None:
    write_run(tmp_path, stacks=CHOSEN, trials=3, batch_sizes=(1,), undefended=0.01)
    assert any(line.startswith("INVALID: ") for line in broken_limits([tmp_path], max_psnr=90.0))
    assert broken_limits([tmp_path], max_epsilon=8.0, defenses=["dp"]) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no limit is given"),
        ({"max_psnr": 1.0, "defenses": ["pruningg"]}, "--defense: pruningg is none of these"),
    ],
)
def test_checks_of_nothing_are_refused(
    run_folder: Path, given: dict[str, object], message: str
) -> None:
    with pytest.raises(ReportError, match=message):
        broken_limits([run_folder], **given)  # type: ignore[arg-type]


def test_only_undefended_stacks_are_no_subject(tmp_path: Path) -> None:
    write_run(tmp_path, stacks={"none": STACKS["none"]}, trials=3, batch_sizes=(1,))
    with pytest.raises(ReportError, match="no defended stack"):
        broken_limits([tmp_path], max_psnr=1.0)


def test_a_run_that_leaks_more_than_before(tmp_path: Path) -> None:
    before = written(tmp_path / "before")
    assert grown(before, written(tmp_path / "same")) == []
    leakier = written(tmp_path / "leakier", pruning=weaker(STACKS["pruning"], 0.95))
    lines = grown(before, leakier)
    assert lines and all(line.startswith("pruning, ") for line in lines)
    assert "before" in lines[0]
    assert grown(leakier, before) == []


def test_a_larger_epsilon_and_what_is_gone_are_told(tmp_path: Path) -> None:
    before = written(tmp_path / "before")
    weaker_claim = written(tmp_path / "weaker", dp=weaker(STACKS["dp"], 0.12, 9.5))
    assert grown(before, weaker_claim) == ["dp: ε 9.5, before 7.82"]
    fewer = write_run(
        tmp_path / "fewer",
        stacks={name: CHOSEN[name] for name in ("none", "dp")},
        trials=3,
        batch_sizes=(1,),
        rounds=3,
    )
    gone = grown(before, fewer)
    assert gone and all("pruning" in line and "not measured any more" in line for line in gone)
    other = write_run(tmp_path / "other", trials=3, batch_sizes=(2,), rounds=3)
    with pytest.raises(ReportError, match="no attack on a defense in common"):
        grown(before, other)


STATED = {"epsilon": 7.82, "delta": 1e-5, "unit": "client", "relation": "zero_out"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, False),
        ({"unit": "example"}, True),
        ({"relation": "replace_one"}, True),
        ({"relation": "close", "epsilon": 4.0}, True),
        ({"relation": "relative"}, True),
        ({"relation": None}, True),
        ({"delta": 1e-3}, True),
        ({"delta": None}, True),
        ({"delta": 1e-6}, False),
    ],
)
def test_a_claim_of_something_else_is_told(
    change: dict[str, Any], told: bool, tmp_path: Path
) -> None:
    def claiming(run: Path, claim: dict[str, Any]) -> Path:
        path = run / "rounds.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if row["defense"] == "dp":
                row |= {"epsilon": claim["epsilon"], "privacy": claim}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run

    before = claiming(written(tmp_path / "before"), STATED)
    after = claiming(written(tmp_path / "after"), STATED | change)
    lines = grown(before, after)
    assert bool(lines) == told and all(line.startswith("dp: ") for line in lines)


def altered(run: Path, change: Callable[[dict[str, Any]], bool | None]) -> Path:
    """Changes the lines of a run's results; a line for which `change` returns False is removed."""
    path = run / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [row for row in rows if change(row) is not False]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return run


def leak(row: dict[str, Any]) -> None:
    """An attack that gets 40 dB more."""
    if row["defense"]["name"] == "dp" and row["metrics"]["psnr"] is not None:
        row["metrics"]["psnr"] += 40


def failed(row: dict[str, Any]) -> None:
    if row["defense"]["name"] == "dp":
        row |= {"status": "failed", "reason": "broken", "metrics": None, "control": None}
        row["per_image"] = None


def labels_alone(row: dict[str, Any]) -> bool:
    return row["defense"]["name"] != "dp" or row["attack"]["label"] == "label_inference"


@pytest.mark.parametrize("limit", ["max_psnr", "max_gain", "max_epsilon"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_limit_that_nothing_is_above_is_refused(
    limit: str, value: float, run_folder: Path
) -> None:
    with pytest.raises(ReportError, match=f"{limit.replace('_', '-')}: expected a finite number"):
        broken_limits([run_folder], **{limit: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [failed, labels_alone])
def test_what_no_attack_measured_keeps_to_no_limit(
    change: Callable[[dict[str, Any]], bool | None], tmp_path: Path
) -> None:
    run = altered(written(tmp_path), change)
    for limit, what in (("max_psnr", "PSNR"), ("max_gain", "gain")):
        (line,) = broken_limits([run], **{limit: 90.0}, defenses=["dp"])  # type: ignore[arg-type]
        assert line.startswith("dp (") and f"has a {what}" in line
        assert broken_limits([run], **{limit: 90.0}, defenses=["pruning"]) == []  # type: ignore[arg-type]


def test_an_epsilon_that_no_line_states_is_above_any_limit(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (run / "rounds.jsonl").unlink()
    (line,) = broken_limits([run], max_epsilon=100.0, defenses=["dp"])
    assert line.startswith("dp: no line of rounds.jsonl states its ε")


def test_each_seed_has_to_keep_to_the_limit_of_epsilon(tmp_path: Path) -> None:
    for seed in (1, 2):
        written(tmp_path / str(seed))
    path = tmp_path / "2" / "rounds.jsonl"
    rounds = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rounds:
        row |= {"epsilon": None, "privacy": None}
    path.write_text("".join(json.dumps(row) + "\n" for row in rounds))
    assert broken_limits([tmp_path], max_epsilon=8.0, defenses=["dp"]) == ["dp: ε is inf, above 8"]


def test_a_run_that_waits_for_its_truth_keeps_to_no_limit(tmp_path: Path) -> None:
    run = altered(written(tmp_path), lambda row: row.update(status="unscored", metrics=None))
    assert any(line.startswith("UNSCORED: ") for line in broken_limits([run], max_psnr=90.0))


@pytest.mark.parametrize("grown_member", ["eval", "train"])
def test_every_member_of_a_sweep_is_compared_with_its_own(
    grown_member: str, tmp_path: Path
) -> None:
    for sweep in ("before", "after"):
        for mode in ("eval", "train"):
            write_run(
                tmp_path / sweep / mode,
                stacks=CHOSEN,
                trials=3,
                batch_sizes=(1,),
                rounds=3,
                variant={"training.mode": mode},
            )
    altered(tmp_path / "after" / grown_member, leak)
    lines = grown(tmp_path / "before", tmp_path / "after")
    assert lines and all(f"training.mode={grown_member}: gain" in line for line in lines)


def test_each_threat_model_is_compared_with_its_own(tmp_path: Path) -> None:
    """Rows of attackers that know labels neither hide nor stand for those of others."""

    def twice(folder: Path, weaker_leaks: bool) -> Path:
        run, other = written(folder), written(folder.with_name(f"{folder.name}-known"))
        altered(other, lambda row: row["knowledge"].update(labels="known"))
        altered(other, leak)
        if weaker_leaks:
            altered(run, leak)
        lines = [path.joinpath("results.jsonl").read_text() for path in (run, other)]
        (run / "results.jsonl").write_text("".join(lines))
        return run

    before = twice(tmp_path / "before", weaker_leaks=False)
    after = twice(tmp_path / "after", weaker_leaks=True)
    assert any(line.startswith("dp, ") for line in grown(before, after))


def test_an_attack_that_fails_now_is_told(tmp_path: Path) -> None:
    before, after = written(tmp_path / "before"), altered(written(tmp_path / "after"), failed)
    lines = grown(before, after)
    assert lines and all("dp" in line and "not measured any more" in line for line in lines)


def of_attack(label: str, **metrics: float) -> Callable[[dict[str, Any]], None]:
    """A change of what an attack recovers behind dp."""

    def change(row: dict[str, Any]) -> None:
        if row["defense"]["name"] == "dp" and row["attack"]["label"] == label and row["metrics"]:
            row["metrics"] |= metrics

    return change


def certified(count: int, false: int = 0) -> Callable[[dict[str, Any]], None]:
    def change(row: dict[str, Any]) -> None:
        if row["defense"]["name"] == "dp" and row["attack"]["label"] == "inverting_gradients":
            row["certificate"] = {"images": 4, "certified": count, "false": false}

    return change


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (
            of_attack("label_inference", label_accuracy=0.2),
            of_attack("label_inference", label_accuracy=1.0),
        ),
        (
            of_attack("inverting_gradients", subspace_error=0.9),
            of_attack("inverting_gradients", subspace_error=0.0),
        ),
        (
            of_attack("inverting_gradients", feature_cosine=0.1),
            of_attack("inverting_gradients", feature_cosine=0.99),
        ),
        (
            of_attack("inverting_gradients", membership_auc=0.5),
            of_attack("inverting_gradients", membership_auc=0.94),
        ),
        (of_attack("inverting_gradients", ssim=0.2), of_attack("inverting_gradients", ssim=0.85)),
        (certified(0), certified(1)),
        (lambda row: None, certified(4)),
        (certified(2), certified(2, false=1)),
    ],
)
def test_whatever_else_leaks_more_is_told(
    was: Callable[[dict[str, Any]], None], now: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    before = altered(written(tmp_path / "before"), was)
    after = altered(written(tmp_path / "after"), now)
    lines = grown(before, after)
    assert lines and all(line.startswith("dp, ") for line in lines)
    assert grown(before, before) == grown(after, after) == []


def test_an_interval_that_is_wide_hides_no_leak(tmp_path: Path) -> None:
    """Of three trials that scatter by 30 dB the interval reaches 40 dB: it tells nothing."""

    def scattered(row: dict[str, Any]) -> None:
        if row["defense"]["name"] == "dp" and row["metrics"]["psnr"] is not None:
            row["metrics"]["psnr"] = row["baseline"]["psnr"] + 15 * (row["trial"] - 1)
            row["control"] = None

    def leaking(row: dict[str, Any]) -> None:
        scattered(row)
        if row["defense"]["name"] == "dp" and row["metrics"]["psnr"] is not None:
            row["metrics"]["psnr"] += 8

    before = altered(written(tmp_path / "before"), scattered)
    assert grown(before, before) == []
    lines = grown(before, altered(written(tmp_path / "after"), leaking))
    assert any(line.startswith("dp, inverting_gradients") for line in lines)


def test_one_of_ten_trials_that_leaks_now_is_told(tmp_path: Path) -> None:
    def one(row: dict[str, Any]) -> None:
        chosen = row["attack"]["label"] == "inverting_gradients" and row["trial"] == 4
        if row["defense"]["name"] == "dp" and chosen:
            row["metrics"]["psnr"] += 25

    runs = [
        write_run(tmp_path / n, stacks=CHOSEN, trials=10, batch_sizes=(1,), rounds=3, side=8)
        for n in ("before", "after")
    ]
    lines = grown(runs[0], altered(runs[1], one))
    assert lines and all(line.startswith("dp, inverting_gradients") for line in lines)


def test_of_two_runs_the_one_that_leaks_is_told(tmp_path: Path) -> None:
    """They have one name; whichever of them is read last hides nothing."""

    def of_others(row: dict[str, Any]) -> None:
        row["victims"] = [f"other {row['trial']}"]

    def of_these(row: dict[str, Any]) -> None:
        row["victims"] = [f"one {row['trial']}"]

    before = altered(written(tmp_path / "before"), of_these)
    altered(written(tmp_path / "after" / "a"), of_these)
    leaky = altered(altered(written(tmp_path / "after" / "b"), of_others), leak)
    for name in ("b", "0"):
        leaky = leaky.rename(leaky.with_name(name))
        lines = grown(before, tmp_path / "after")
        assert any(line.startswith("dp, ") and "gain" in line for line in lines)
    # Each of several is compared with that of its own name.
    for name, victims in (("a", of_these), ("0", of_others)):
        altered(written(tmp_path / "earlier" / name), victims)
    lines = grown(tmp_path / "earlier", tmp_path / "after")
    assert lines and all(line.startswith("dp, ") and "figures=0" in line for line in lines)


def test_a_leak_that_was_not_measured_before_is_told(tmp_path: Path) -> None:
    def without(row: dict[str, Any]) -> bool:
        return row["attack"]["label"] != "deep_leakage"

    before = altered(written(tmp_path / "before"), without)
    after = written(tmp_path / "after")
    assert not any(line.startswith("dp, ") for line in grown(before, after)), "it leaks nothing"
    lines = grown(before, altered(after, leak))
    assert any(line.startswith("dp, deep_leakage") for line in lines)
    failing = altered(written(tmp_path / "failing"), failed)
    lines = grown(failing, altered(written(tmp_path / "leaky"), leak))
    assert any(line.startswith("dp, inverting_gradients") for line in lines)


def test_more_failures_are_told(tmp_path: Path) -> None:
    def later(row: dict[str, Any]) -> None:
        if row["trial"] > 0 and row["attack"]["label"] == "inverting_gradients":
            failed(row)

    before = written(tmp_path / "before")
    lines = grown(before, altered(written(tmp_path / "after"), later))
    assert lines and all(line.startswith("dp, inverting_gradients") for line in lines)


def parameters(row: dict[str, Any]) -> None:
    if row["attack"]["label"] == "inverting_gradients":
        row["attack"]["parameters"] = {"iterations": 1}


def width(row: dict[str, Any]) -> None:
    row["model"]["parameters"]["width"] = 8


def steps(row: dict[str, Any]) -> None:
    row["training"]["lr"] = 0.01


def other_source(row: dict[str, Any]) -> None:
    row["dataset"] = "faces"


def other_images(row: dict[str, Any]) -> None:
    row["victims"] = [f"{row['trial']} of another ward"]


@pytest.mark.parametrize("change", [parameters, width, steps, other_source, other_images])
def test_what_is_measured_otherwise_does_not_compare(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    def drawn(row: dict[str, Any]) -> None:
        row["victims"] = [f"{row['trial']}"]

    before = altered(written(tmp_path / "before"), drawn)
    after = altered(altered(written(tmp_path / "after"), drawn), change)
    assert grown(before, after) and grown(after, before)
    assert grown(after, after) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("clients: 10", "clients: 100", "data.clients"),
        ("training: {rounds: 8}", "training: {rounds: 2}", "training.rounds"),
        ("seed: 7", "seed: 8", None),
    ],
)
def test_another_setting_does_not_compare(
    old: str, new: str, said: str | None, tmp_path: Path
) -> None:
    before, after = written(tmp_path / "before"), written(tmp_path / "after")
    text = (after / "scenario.yaml").read_text(encoding="utf-8")
    (after / "scenario.yaml").write_text(text.replace(old, new), encoding="utf-8")
    lines = grown(before, after)
    assert any(said in line for line in lines) if said else lines == []


def planned(run: Path, data: str) -> Path:
    plan = {"scenario": "photos-demo", "variant": {}, "rounds": 0, "lines": 0, "attack_runs": 0}
    (run / "plan.json").write_text(json.dumps(plan | {"resumable": False, "origin": data}))
    return run


def test_other_data_under_one_name_do_not_compare(tmp_path: Path) -> None:
    runs = [planned(written(tmp_path / d), f"data:{d}") for d in ("one", "other")]
    assert grown(*runs) and grown(runs[0], runs[0]) == []


def test_an_attack_that_works_was_carried_out_on_the_defense(tmp_path: Path) -> None:
    """A weaker attack that was measured does not stand for it."""

    def left_out(row: dict[str, Any]) -> bool:
        return bool(
            {"dp", "inverting_gradients"} - {row["defense"]["name"], row["attack"]["label"]}
        )

    def broken(row: dict[str, Any]) -> None:
        if not left_out(row):
            failed(row)

    def weaker_version(row: dict[str, Any]) -> None:
        if not left_out(row):
            row["attack"]["parameters"] = {"iterations": 1}

    whole = written(tmp_path / "whole")
    assert broken_limits([whole], max_gain=60.0, max_psnr=90.0) == []
    for change in (left_out, broken, weaker_version):
        run = altered(written(tmp_path / change.__name__), change)
        for limit in ({"max_gain": 60.0}, {"max_psnr": 90.0}):
            (line,) = broken_limits([run], **limit)  # type: ignore[arg-type]
            assert line.startswith("dp (") and "inverting_gradients" in line
        assert broken_limits([run], max_gain=60.0, defenses=["pruning"]) == []


def test_trials_that_failed_hide_no_gain(tmp_path: Path) -> None:
    """One of ten was measured: that the others count as guesses is no limit kept to."""

    def one(row: dict[str, Any]) -> None:
        if row["defense"]["name"] != "dp" or row["attack"]["label"] != "inverting_gradients":
            return
        if row["trial"]:
            failed(row)
        else:
            row["metrics"]["psnr"] = row["baseline"]["psnr"] + 5

    run = write_run(tmp_path, stacks=CHOSEN, trials=10, batch_sizes=(1,), rounds=3, side=8)
    lines = broken_limits([altered(run, one)], max_gain=4.0, defenses=["dp"])
    assert any("inverting_gradients, batch size 1" in line and "above 4" in line for line in lines)


def test_the_status_says_it(run_folder: Path) -> None:
    def status(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(words))
        return done.exit_code, done.output

    folder = str(run_folder)
    assert status("check", folder, "--max-psnr", "90") == (0, "all limits are kept\n")
    code, said = status("check", folder, "--max-epsilon", "1", "--defense", "dp")
    assert (code, said) == (1, "dp: ε is 7.82, above 1\n")
    assert status("check", folder)[0] == 2
    assert status("check", folder, "--max-psnr", "nan")[0] == 2
    assert status("compare", folder, folder)[0] == 0
