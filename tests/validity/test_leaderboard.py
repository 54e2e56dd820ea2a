"""An honest leaderboard: pictures, failures, baselines, spread, controls (rules 10 to 15)."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fedsim.report import (
    LeaderboardRow,
    invalid_reasons,
    leaderboard_rows,
    load_runs,
    positive_controls,
    render,
    save_grid,
    write_report,
)
from fedsim.report.charts import _list_accused
from fedsim.report.dossier import dossier_of
from fedsim.report.facts import standing_still
from fedsim.report.judge import Verdict, judge
from fedsim.report.messages import _describe_evidence, describe_cautions, describe_control
from fedsim.report.row import population_of
from fedsim.scoring import accuracy, student_interval

METRICS = (
    "rmse",
    "psnr",
    "ssim",
    "lpips",
    "feature_error",
    "feature_cosine",
    "label_accuracy",
    "attack_loss",
)


def line(
    psnr: float | None,
    *,
    trial: int = 0,
    defense: str = "none",
    stack: Sequence[Mapping[str, Any]] = (),
    attack: str = "inverting_gradients",
    batch_size: int = 1,
    guess: float | None = 12.0,
    other: float | None = 9.0,
    **metrics: float,
) -> dict[str, Any]:
    """A results row; `psnr` None is a failed trial."""
    blank: dict[str, float | None] = dict.fromkeys(METRICS)
    ok = psnr is not None
    return {
        "scenario": "s", "variant": {}, "dataset": "faces",
        "model": {"name": "convnet", "parameters": {}}, "learner": "sgd", "training": {},
        "defense": {"name": defense, "stack": list(stack)},
        "attack": {"name": attack, "label": attack, "restarts": 1, "parameters": {}},
        "vantage": "server", "knowledge": {"labels": "inferred", "bn": "none"},
        "batch_size": batch_size, "round": 1, "client": 0, "trial": trial, "seed": trial,
        "observation": f"{defense}/round-0001/client-0000-b{batch_size}-t{trial}",
        "status": "ok" if ok else "failed", "reason": None if ok else "it diverged",
        "metrics": blank | {"psnr": psnr} | metrics if ok else blank,
        "baseline": {"name": "mean_image", **blank, "psnr": guess, "ssim": 0.1, "rmse": 0.25,
                     "label_accuracy": 0.2},
        "control": {"other_update": blank | {"psnr": other} if other is not None else None},
        "utility": {"train_loss": 1.0, "test_accuracy": 0.5},
        "privacy": {"epsilon": "inf", "delta": None, "accountant": None, "unit": None,
                    "reason": "no noise is added", "audited_epsilon": None},
        "cost": {"seconds": 1.0, "iterations": 10, "iterations_per_second": 10.0,
                 "peak_memory_bytes": 1, "bytes_up": 1},
    }  # fmt: skip


def board(folder: Path, lines: Sequence[dict[str, Any]]) -> list[LeaderboardRow]:
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return leaderboard_rows([folder])


def mean(row: LeaderboardRow, name: str = "psnr") -> float:
    summary = row.metrics[name]  # type: ignore[index]
    assert summary is not None
    return summary.mean


def test_failures_count_as_guessing(tmp_path: Path) -> None:
    """Rule 11: a failed trial is its row's zero-information guess, in every aggregate."""
    (row,) = board(
        tmp_path,
        [
            line(20.0, trial=0, ssim=0.9, rmse=0.1),
            line(None, trial=1, guess=10.0),
            line(None, trial=2, guess=12.0),
        ],
    )
    assert (row.n_ok, row.n) == (1, 3)
    assert mean(row) == pytest.approx((20 + 10 + 12) / 3)
    assert mean(row, "ssim") == pytest.approx((0.9 + 0.1 + 0.1) / 3)
    assert mean(row, "rmse") == pytest.approx((0.1 + 0.25 + 0.25) / 3)
    assert row.metrics["psnr"] is not None
    assert row.metrics["psnr"].median == 12.0
    assert row.gain is not None
    assert row.gain.mean == pytest.approx((20 - 12) / 3)
    assert row.gain.n == 3
    assert row.failures == {"it diverged": 2}
    assert "1/3" in render([row])
    record = next(iter(csv.DictReader(io.StringIO(render([row], "csv")))))
    assert (record["n_ok"], record["n"]) == ("1", "3")


def test_a_stack_where_everything_failed_is_shown_as_guessing(tmp_path: Path) -> None:
    """Rule 11: it neither vanishes from the table nor looks better than guessing."""
    (row,) = board(tmp_path, [line(None, trial=i, guess=11.0 + i) for i in range(3)])
    assert (row.n_ok, row.n) == (0, 3)
    assert mean(row) == pytest.approx(12.0)
    assert row.gain is not None
    assert (row.gain.mean, row.gain.max) == (0.0, 0.0)


def test_a_failure_without_a_guess_leaves_no_mean_and_counts_as_no_gain(tmp_path: Path) -> None:
    """Rule 11: an update that was lost does not hide what the others leaked."""
    lines = [line(30.0, trial=trial) for trial in range(5)]
    rows = board(tmp_path, [*lines, line(None, trial=5, guess=None)])
    (row,) = rows
    assert row.metrics["psnr"] is None
    assert row.gain is not None
    assert (row.gain.n, row.gain.mean) == (6, pytest.approx(5 * 18 / 6))
    (control,) = positive_controls(rows)
    assert control.status == "passed"
    (verdict,) = judge(rows).verdicts
    assert verdict.level == "leak"


def test_a_trial_without_images_counts_as_guessing(tmp_path: Path) -> None:
    """Rule 11: an attack that answers labels alone for once does not hide its pictures."""
    lines = [line(30.0, trial=trial, label_accuracy=1.0) for trial in range(5)]
    without = line(30.0, trial=5, guess=None, label_accuracy=1.0)
    without["metrics"] |= {"psnr": None}
    (row,) = board(tmp_path, [*lines, without])
    assert row.gain is not None
    assert row.gain.mean == pytest.approx(5 * 18 / 6)
    assert row.gains["label_accuracy"].mean == pytest.approx(0.8)


def test_exact_pictures_are_no_protection_though_a_trial_was_lost(tmp_path: Path) -> None:
    """The interval of 48, 48, 48 and 0 dB reaches below 0."""
    lines = [line(60.0, trial=trial, guess=12.0, other=12.0) for trial in range(3)]
    lost = {**line(0.0, trial=3), "status": "failed", "reason": "lost", "metrics": None}
    behind = [{**row, "defense": {"name": "loses", "stack": [{"name": "x"}]}} for row in lines]
    rows = board(tmp_path, [*lines, *behind, {**lost, "defense": behind[0]["defense"]}])
    (verdict,) = [v for v in judge(rows).verdicts if v.strongest.defense == "loses"]
    assert verdict.strongest.gain is not None and verdict.strongest.gain.certain < 0
    assert verdict.level == "partial"
    assert verdict.leaking and (verdict.leaking.count, verdict.leaking.n) == (3, 4)
    assert verdict.strongest.due and verdict.strongest.due.max == pytest.approx(48.0)


def test_every_line_carries_the_guess_and_the_other_update(tmp_path: Path) -> None:
    """Rule 12: gain over the zero-information guess, trial by trial, and the other update."""
    (row,) = board(
        tmp_path, [line(20.0, guess=15.0, other=19.0), line(10.0, trial=1, guess=5.0, other=9.5)]
    )
    assert row.baseline["psnr"] == pytest.approx(10.0)
    assert row.gain is not None
    assert (row.gain.mean, row.gain.std) == (5.0, 0.0)  # paired: every trial gained exactly 5 dB
    assert row.others["psnr"].mean == pytest.approx(14.25)
    assert row.over_other is not None
    assert row.over_other.mean == pytest.approx(0.75)
    for text in (render([row], "json"), render([row], "csv")):
        assert "over_other" in text
        assert "gain" in text
    heading = next(text for text in render([row]).splitlines() if text.startswith("defense"))
    assert "gain" in heading
    assert "other" in heading


def test_a_prior_that_draws_the_same_from_any_update_is_called_out(tmp_path: Path) -> None:
    """Rule 12: plausible pictures that do not depend on the victim's update are no leak."""
    lines = [line(22.0, trial=i, other=22.0 + 0.1 * (-1) ** i) for i in range(6)]
    verdict = judged(board(tmp_path, lines))
    assert (verdict.finding, verdict.strongest.is_uninformed) == ("no answer", True)
    assert "control as good" in [caution.kind for caution in verdict.cautions]


def test_mean_median_tail_and_interval_stand_side_by_side(tmp_path: Path) -> None:
    """Rule 13: several metrics, the worst case and Student's interval beside the mean (and 7)."""
    values = [10.0, 11.0, 10.5, 30.0, 9.5, 10.2]
    lines = [line(v, trial=i, ssim=v / 60, rmse=1 / v, lpips=5 / v) for i, v in enumerate(values)]
    lines[0]["per_image"] = {"psnr": [4.0, 44.0]}
    (row,) = board(tmp_path, lines)
    summary = row.metrics["psnr"]
    assert summary is not None
    assert summary.mean == pytest.approx(np.mean(values))
    assert summary.median == pytest.approx(10.35)
    assert row.worst["psnr"] == 44.0  # the worst image, though its batch's mean is low
    assert row.worst["ssim"] == pytest.approx(0.5)
    assert row.worst["rmse"] == pytest.approx(1 / 30)
    assert row.worst["lpips"] == pytest.approx(5 / 30)
    assert summary.low is not None
    assert summary.high is not None
    assert summary.low < summary.mean < summary.high
    # The outlier makes the interval wide and lopsided, as it should be.
    assert summary.high - summary.mean == pytest.approx(summary.mean - summary.low)
    record = next(iter(csv.DictReader(io.StringIO(render([row], "csv")))))
    for name in ("psnr", "ssim", "rmse", "lpips"):
        for part in ("mean", "low", "high", "median", "worst"):
            assert record[f"{name}_{part}"], (name, part)


DP = ({"name": "clip", "norm": 1.0},)


def test_a_broken_attack_makes_the_whole_table_invalid(tmp_path: Path) -> None:
    """Rule 15: if the undefended stack is not beaten, low figures under a defense prove nothing."""
    rows = board(tmp_path, [line(14.9), line(12.0, defense="dp", stack=DP)])
    (control,) = positive_controls(rows)
    assert control.status == "failed"
    assert "2.9 dB" in describe_control(control)
    assert_invalid(rows, tmp_path, "2.9 dB")


def test_a_table_without_an_undefended_stack_has_no_positive_control(tmp_path: Path) -> None:
    """Rule 15: no undefended stack, no conclusion; a stack called none is not enough."""
    rows = board(tmp_path, [line(30.0, defense="none", stack=DP)])
    (control,) = positive_controls(rows)
    assert control.status == "absent"
    assert_invalid(rows, tmp_path, "no positive control")


def test_the_control_is_at_the_smallest_batch_size(tmp_path: Path) -> None:
    """Rule 15: success at a larger batch size does not excuse failure at the smallest."""
    rows = board(tmp_path, [line(12.5, batch_size=1), line(20.0, batch_size=8)])
    assert positive_controls(rows)[0].status == "failed"
    rows = board(tmp_path, [line(20.0, batch_size=1), line(12.5, batch_size=8)])
    assert positive_controls(rows)[0].status == "passed"


def test_recovered_labels_are_no_positive_control(tmp_path: Path) -> None:
    """Rule 15: an attack that only infers labels does not show that image attacks work."""
    labels_only = line(0.0, attack="label_inference", label_accuracy=1.0)
    labels_only["metrics"]["psnr"] = None
    rows = board(tmp_path, [labels_only, line(12.0, defense="dp", stack=DP)])
    assert positive_controls(rows)[0].status == "failed"
    rows = board(tmp_path, [labels_only, line(15.5)])
    assert positive_controls(rows)[0].status == "passed"


def test_each_comparison_is_judged_by_itself(tmp_path: Path) -> None:
    """Rule 15: one whose attacks do not work is INVALID in every output, and another is not."""
    good, bad = line(30.0), line(12.1)
    bad["variant"] = {"training.local.mode": "eval"}
    rows = board(tmp_path, [good, bad])
    assert [control.status for control in positive_controls(rows)] == ["passed", "failed"]
    (reason,) = invalid_reasons(rows)
    assert "training.local.mode=eval" in reason and "batch size 1" in reason
    table = render(rows, width=300)
    assert table.count("INVALID: ") == 1
    assert [text for text in table.splitlines() if text.startswith("INVALID  ")] == [
        "INVALID  s (training.local.mode=eval), faces, convnet"
    ]
    assert "s, faces, convnet" in table.splitlines()
    document = json.loads(render(rows, "json"))
    assert [row["valid"] for row in document["rows"]] == [True, False]
    assert document["rows"][0]["invalid_reason"] == ""
    records = list(csv.DictReader(io.StringIO(render(rows, "csv"))))
    assert [record["valid"] for record in records] == ["True", "False"]
    assert "try more iterations" in records[1]["invalid_reason"]
    page = write_report(tmp_path).read_text()
    assert "INVALID in part" in page and page.count("<strong>INVALID</strong>") == 1


def test_a_failed_attack_is_never_the_strongest(tmp_path: Path) -> None:
    """Its guess is no attack: above working ones of negative gain it would say that none works."""
    failed, worse = (
        line(None, attack="idlg", defense="dp", stack=DP),
        line(8.0, defense="dp", stack=DP, other=7.0),
    )
    rows = board(tmp_path, [line(30.0), failed, worse])
    behind = [row for row in rows if row.defense == "dp"]
    assert [(row.attack, row.strongest) for row in behind] == [
        ("inverting_gradients", True),
        ("idlg", False),
    ]
    assert behind[0].gain is not None and behind[0].gain.mean < 0
    assert judge(rows).verdicts[1].strongest.attack == "inverting_gradients"


def test_where_every_attack_failed_none_is_marked(tmp_path: Path) -> None:
    rows = board(tmp_path, [line(30.0), line(None, defense="dp", stack=DP)])
    assert [row.strongest for row in rows] == [True, False]
    verdict = judge(rows).verdicts[1]
    assert (verdict.level, verdict.reason.kind) == ("failed", "all failed")


def test_where_every_trial_failed_no_figure_of_the_guess_is_shown(tmp_path: Path) -> None:
    """Its guess has 77.0 dB, and by chance all labels."""
    failed = line(None, defense="dp", stack=DP, guess=77.0)
    failed["baseline"]["label_accuracy"] = 1.0
    rows = board(tmp_path, [line(30.0, ssim=0.9, label_accuracy=1.0), failed])
    assert rows[1].gain is not None and rows[1].metrics["label_accuracy"] is not None
    text = render(rows, width=200)
    (cells,) = [each for each in text.splitlines() if " 0/1 " in each]
    assert "77.0" not in cells and "+0.0" not in cells and "0/1 (" not in cells
    assert "100%" not in cells and "where all trials failed" in " ".join(text.split())
    html = write_report(tmp_path).read_text(encoding="utf-8")
    dossier = dossier_of(load_runs([tmp_path]), tmp_path)
    for page in (html, dossier):
        lines = [each for each in re.findall(r"<tr.*?</tr>", page, re.S) if ">0/1<" in each]
        assert lines and all("100%" not in each and "77.0" not in each for each in lines)


def evaluated(share: float, loss: float | None = 1.4, **case: Any) -> dict[str, Any]:
    """A results row of a model that was tested on 80 images of four classes."""
    row = line(30.0, **case)
    row["utility"] |= {
        "test_accuracy": share,
        "test_loss": loss,
        "test_examples": 80,
        "test_chance": 0.25,
    }
    return row


@pytest.mark.parametrize(
    ("share", "loss", "why"),
    [
        (0.25, 1.4, "the model learned nothing"),
        (0.34, 1.4, "the model learned nothing"),  # 25 to 45%: 80 images do not show more
        (0.25, None, "training diverged"),
        (0.25, 40.0, "training diverged"),
        (0.5, 40.0, None),
        (0.9, 0.3, None),
    ],
)
def test_a_model_at_chance_is_said_to_be(
    share: float, loss: float | None, why: str | None, tmp_path: Path
) -> None:
    rows = board(tmp_path, [evaluated(share, loss)])
    table = re.sub(r"\s+", " ", render(rows, width=200))
    assert "accuracy on 80 test examples (chance 25%)" in table
    document = json.loads(render(rows, "json"))
    (record,) = csv.DictReader(io.StringIO(render(rows, "csv")))
    page = write_report(tmp_path).read_text()
    assert record["test_examples"] == "80" and record["test_chance"] == "0.25"
    for told in (" ".join(document["warnings"]), record["warning"], table, page):
        text = told.lower()
        assert why is None or why in text
        assert why is not None or ("learned nothing" not in text and "diverged" not in text)
    assert float(record["test_accuracy_low"]) < share < float(record["test_accuracy_high"])
    assert "80 test examples" in page


def test_a_difference_within_what_the_test_set_shows_is_said_to_be(tmp_path: Path) -> None:
    """3 of 80 images are no price."""
    rows = board(tmp_path, [evaluated(0.9), evaluated(0.8625, defense="dp", stack=DP)])
    costs = judge(rows).verdicts[1].costs
    assert (costs.points, costs.is_apart) == (pytest.approx(-3.75), False)


def test_wilsons_interval_is_wilsons() -> None:
    """Of 20 of 80: (p + z²/2n ± z sqrt(pq/n + z²/4n²)) / (1 + z²/n)."""
    found, z, n = accuracy(0.25, 80, 0.25), 1.959963984540054, 80
    center, half = 0.25 + z * z / 2 / n, z * math.sqrt(0.1875 / n + z * z / 4 / n**2)
    assert found.low == pytest.approx((center - half) / (1 + z * z / n))
    assert found.high == pytest.approx((center + half) / (1 + z * z / n))


def test_a_failing_attack_fails_the_control(tmp_path: Path) -> None:
    """Rules 11 and 15: one lucky trial among failures does not pass the control."""
    rows = board(tmp_path, [line(20.0), *(line(None, trial=i) for i in range(1, 4))])
    assert positive_controls(rows)[0].status == "failed"


def test_where_only_features_are_attacked_the_best_attack_is_the_control(tmp_path: Path) -> None:
    """Rule 15: by the least span error that any attack leaves of the undefended stack."""
    rows = board(tmp_path, [of_features(0.9, attack="rough"), of_features(0.2, attack="fine")])
    (control,) = positive_controls(rows)
    assert control.status == "passed"
    assert "fine leaves a span error of 0.200" in describe_control(control)
    (control,) = positive_controls(board(tmp_path, [of_features(0.6)]))
    assert control.status == "failed"


def test_features_leak_by_the_upper_end_of_the_interval(tmp_path: Path) -> None:
    """Rule 13: three lucky trials of four are not enough, though their mean is."""
    for errors, level in (([0.4] * 4, "features"), ([0.2, 0.2, 0.2, 1.0], "unseen")):
        rows = board(tmp_path, [of_features(error, trial=i) for i, error in enumerate(errors)])
        (control,) = positive_controls(rows)
        assert control.status == "passed"
        (verdict,) = judge(rows).verdicts
        assert verdict.level == level


def test_what_was_measured_differently_is_not_averaged(tmp_path: Path) -> None:
    """Two clients of one trial are two measurements, a copy is none, and a mean over several
    releases is another case than a single one."""
    one, other, copy, many = line(20.0), line(10.0), line(20.0), line(30.0)
    other["client"], many["releases"] = 1, 4
    rows = board(tmp_path, [one, other, copy, many])
    assert [(row.n, mean(row)) for row in rows] == [(1, 30.0), (2, 15.0)]


def test_who_is_accused_first_is_the_one_of_highest_score(tmp_path: Path) -> None:
    """The curve of the report's figure starts at the scores that accuse most."""
    told = line(0.0, attack="membership_inference", membership_auc=0.75)
    told["metrics"]["psnr"], told["release"] = None, {"kind": "sketch"}
    told["baseline"]["membership_auc"] = 0.5
    rows = board(tmp_path, [told])
    path = tmp_path / "reconstructions/none/membership_inference/round-0001"
    path.mkdir(parents=True)
    members = torch.tensor([False, True, False, True])
    scores = torch.tensor([-1.0, 3.0, 1.0, 0.0])
    save_file({"membership": scores, "members": members}, path / "client-0000-b1-t0.safetensors")
    (found,) = _list_accused(rows, load_runs([tmp_path]), {"none": 0})
    assert found.points == [(0, 0), (0, 0.5), (0.5, 0.5), (0.5, 1), (1, 1)]


@pytest.mark.parametrize("trials", [1, 2])
def test_a_small_gain_of_too_few_trials_is_no_leak(tmp_path: Path, trials: int) -> None:
    """Rule 13: half of all attacks that know nothing gain something in one trial."""
    rows = board(tmp_path, [line(13.0, trial=trial, other=12.5) for trial in range(trials)])
    (verdict,) = judge(rows).verdicts
    assert verdict.level == "unseen"


def test_an_attack_that_failed_has_recovered_no_label(tmp_path: Path) -> None:
    """Rule 11: what counts as the guess is not told as a find."""
    rows = board(tmp_path, [line(None, trial=trial) for trial in range(3)])
    (verdict,) = judge(rows).verdicts
    assert "labels" not in verdict.told


def test_features_of_any_update_are_no_leak_and_no_control(tmp_path: Path) -> None:
    """Rule 12: features of noise span most of a batch's, whatever the update."""
    lines = [of_features(0.22 + 0.01 * (trial % 2), trial=trial, other=None) for trial in range(4)]
    for trial, row in enumerate(lines):
        row["control"] = {"other_update": {"subspace_error": 0.22 + 0.01 * (trial % 3 > 0)}}
    rows = board(tmp_path, lines)
    (control,) = positive_controls(rows)
    assert control.status == "failed"
    assert "another update" in describe_control(control)
    (verdict,) = judge(rows).verdicts
    assert verdict.level == "unseen"


def test_a_prior_that_draws_the_same_from_any_update_is_no_control(tmp_path: Path) -> None:
    """Rules 12 and 15: a gain that rests on no update does not show that attacks work."""
    blind = [line(30.0, trial=i, other=30.0, attack="a_prior") for i in range(4)]
    rows = board(tmp_path, [*blind, line(13.0, defense="dp", stack=DP)])
    assert_invalid(rows, tmp_path, "another update")
    sees = [line(20.0, trial=i) for i in range(4)]
    (control,) = positive_controls(board(tmp_path, [*blind, *sees]))
    assert control.status == "passed"
    assert "inverting_gradients" in describe_control(control)


def of_features(error: float, **case: Any) -> dict[str, Any]:
    """A results row of an attack on features alone."""
    row = line(0.0, subspace_error=error, **case)
    row["metrics"]["psnr"] = None
    return row


def test_of_claims_that_differ_the_weakest_stands(tmp_path: Path) -> None:
    """And of audits the one that found most: no run's luck makes a stack look more private."""
    lines = [line(20.0, trial=i) for i in range(3)]
    for row, (epsilon, audited) in zip(lines, ((1.0, 0.9), (3.0, 0.4), (2.0, None)), strict=True):
        claim = {"epsilon": epsilon, "delta": 1e-5 * epsilon, "audited_epsilon": audited}
        row["privacy"] |= claim
    (found,) = board(tmp_path, lines)
    assert (found.epsilon, found.delta) == (3.0, pytest.approx(3e-5))
    assert found.audited_epsilon == 0.9
    lines[0]["privacy"]["epsilon"] = "inf"
    (found,) = board(tmp_path, lines)
    assert found.epsilon == math.inf


def assert_invalid(rows: list[LeaderboardRow], folder: Path, why: str) -> None:
    assert any(why in reason for reason in invalid_reasons(rows))
    table = re.sub(r"\s+", " ", render(rows))
    assert table.strip().startswith("INVALID")
    assert why in table
    document = json.loads(render(rows, "json"))
    assert document["valid"] is False
    assert why in " ".join(document["invalid_reasons"])
    for record in csv.DictReader(io.StringIO(render(rows, "csv"))):
        assert record["valid"] == "False"
        assert why in record["invalid_reason"]
    page = re.sub(r"\s+", " ", write_report(folder).read_text())
    assert page.count("<strong>INVALID</strong>") >= 2
    assert why in page


def test_pictures_are_the_scored_pixels(tmp_path: Path) -> None:
    """Rule 10: a faint, dark reconstruction is shown faint and dark, in grid and report alike."""
    truth = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    faint = 0.4 + 0.02 * torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    shown = (faint[0, 0] * 255).round().byte().numpy()
    assert shown.max() - shown.min() <= 6

    save_grid(tmp_path / "grid.png", truth, faint)  # 32 pixels are enlarged to 64; the gap is 2
    enlarged = shown.repeat(2, 0).repeat(2, 1)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "grid.png"))[66:], enlarged)

    board(tmp_path, [line(20.0)])
    path = tmp_path / "reconstructions/none/inverting_gradients/round-0001"
    path.mkdir(parents=True)
    save_file({"truth": truth, "reconstruction": faint}, path / "client-0000-b1-t0.safetensors")
    uris = re.findall(r'src="data:image/png;base64,([^"]+)"', write_report(tmp_path).read_text())
    assert len(uris) == 4, "truth and reconstruction, in the matrix and in its details"
    for uri in uris[1::2]:
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri))))
        assert np.array_equal(pixels, shown)


def test_the_shown_trial_is_the_median_one(tmp_path: Path) -> None:
    """Rules 10 and 13: the report shows neither the luckiest nor the worst trial."""
    values = [25.0, 13.0, 18.0]
    board(tmp_path, [line(value, trial=i) for i, value in enumerate(values)])
    path = tmp_path / "reconstructions/none/inverting_gradients/round-0001"
    path.mkdir(parents=True)
    for trial in range(3):
        shade = torch.full((1, 1, 8, 8), 0.1 + 0.2 * trial)
        save_file(
            {"truth": shade, "reconstruction": shade.clone()},
            path / f"client-0000-b1-t{trial}.safetensors",
        )
    page = write_report(tmp_path).read_text()
    (uri,) = set(re.findall(r'src="data:image/png;base64,([^"]+)"', page))
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri))))
    assert pixels.max() == round(255 * 0.5)


def behind(server: str | None, psnr: float, **fields: Any) -> dict[str, Any]:
    """A row whose model a server has planted, put an imprint module before, or left alone."""
    head = {"width": 8, "planted": 6 if server == "planted" else 0}
    parameters = {"head": head, **({"imprint": {"bins": 4}} if server == "modified" else {})}
    row = line(psnr, **fields)
    row["model"] = {"name": "convnet", "parameters": parameters}
    return row | ({"server": server} if server else {})


@pytest.mark.parametrize("told", [True, False], ids=["told by the row", "told by the model"])
def test_malicious_servers_are_marked_and_ranked_apart(tmp_path: Path, told: bool) -> None:
    """Rule 29: a planted head is another threat model, and the honest server comes first."""
    lines = [
        behind("planted", 25.0 + trial, trial=trial, attack="factored_inversion")
        for trial in range(3)
    ]
    lines += [behind("modified", 50.0, trial=trial, attack="imprint") for trial in range(3)]
    lines += [behind("honest", 17.0 + trial, trial=trial) for trial in range(3)]
    if not told:
        for one in lines:
            del one["server"]
    rows = board(tmp_path, lines)
    assert [row.server for row in rows] == ["honest", "planted", "modified"]
    assert len({row.comparison for row in rows}) == 3
    assert all(row.strongest for row in rows)
    records = list(csv.DictReader(io.StringIO(render(rows, "csv"))))
    assert [record["server"] for record in records] == ["honest", "planted", "modified"]
    document = json.loads(render(rows, "json"))
    assert [row["server"] for row in document["rows"]] == ["honest", "planted", "modified"]
    table = render(rows, width=120)
    assert "factored_inversion (planted)" in table
    assert "imprint (modified)" in table
    assert "inverting_gradients (" not in table
    assert "convnet, planted by a malicious server" in table
    page = write_report(tmp_path).read_text()
    assert "planted by a malicious server" in page
    assert "factored_inversion</button> <small>planted</small>" in page


def test_an_honest_control_does_not_make_a_planted_table_valid(tmp_path: Path) -> None:
    weak = [behind("planted", 13.0, trial=trial) for trial in range(3)]
    strong = [behind("honest", 30.0, trial=trial) for trial in range(3)]
    rows = board(tmp_path, [*weak, *strong])
    (reason,) = invalid_reasons(rows)
    assert "planted" in reason


def told(folder: Path, rows: list[LeaderboardRow]) -> str:
    """All that a reader is shown: the table and the page, in one line."""
    page = re.sub(r"</?(?:span|button|wbr)\b[^>]*>", "", write_report(folder).read_text())
    return re.sub(r"\s+", " ", render(rows, width=200) + page)


def judged(rows: list[LeaderboardRow], defense: str = "none") -> Verdict:
    (found,) = [v for v in judge(rows).verdicts if v.defense == defense]
    return found


def test_ten_trials_without_a_gain_are_no_certainty(tmp_path: Path) -> None:
    """Rule 13: an interval from 0 to 0 would say that nothing leaks; up to 31% of trials may."""
    rows = board(tmp_path, [line(12.0, trial=trial) for trial in range(10)])
    (row,) = rows
    assert row.gain is not None and (row.gain.low, row.gain.high) == (None, None)
    assert row.leaking is not None
    assert (row.leaking.count, row.leaking.n) == (0, 10)
    assert row.leaking.high == pytest.approx(1 - 0.025**0.1)
    text = told(tmp_path, rows)
    assert "0/10 (0–31)" in text and "0 of 10 (0 to 31%)" in text
    assert "equal trials" in [caution.kind for caution in judged(rows).cautions]
    assert "12.0 [12.0, 12.0]" not in text
    (record,) = csv.DictReader(io.StringIO(render(rows, "csv")))
    assert (record["leaking_count"], record["leaking_n"]) == ("0", "10")
    assert json.loads(render(rows, "json"))["rows"][0]["leaking"]["high"] == row.leaking.high


@pytest.mark.parametrize("otherwise", [12.0, 6.0])
def test_one_exact_picture_of_ten_is_not_hidden_by_nine(tmp_path: Path, otherwise: float) -> None:
    """Rule 13: neither by its own mean, nor by an attack of a higher one."""
    rare = [line(60.0 if trial == 4 else otherwise, trial=trial) for trial in range(10)]
    steady = [line(12.0 + 0.1 * (-1) ** t, trial=t, attack="steady") for t in range(10)]
    rows = board(tmp_path, [*rare, *steady])
    verdict = judged(rows)
    assert (verdict.level, verdict.strongest.attack) == ("partial", "inverting_gradients")
    assert verdict.strongest.due and verdict.strongest.due.max == pytest.approx(48.0)
    assert verdict.leaking and (verdict.leaking.count, verdict.leaking.n) == (1, 10)
    assert "1/10 (0–45)" in told(tmp_path, rows)


def test_a_gain_in_one_trial_of_ten_is_not_called_none(tmp_path: Path) -> None:
    """Rule 13: also below what no attack gains by chance."""
    rows = board(tmp_path, [line(17.0 if t == 4 else 11.9, trial=t) for t in range(10)])
    verdict = judged(rows)
    assert verdict.level == "unseen"
    assert verdict.leaking and (verdict.leaking.count, verdict.leaking.n) == (1, 10)


def test_a_trial_is_exposed_by_what_it_gains_over_both(tmp_path: Path) -> None:
    """Rule 12: not by a gain over the guess here, and over another update there."""
    lines = [line(30.0, trial=0, other=30.0), *(line(12.0, trial=t, other=12.0) for t in (1, 2))]
    lines.append(line(12.0, trial=3, other=0.0))
    (row,) = board(tmp_path, lines)
    assert row.gain is not None and row.gain.max == 18.0
    assert row.over_other is not None and row.over_other.max == 12.0
    assert row.own_gain is not None and row.own_gain.max == 0.0
    assert not row.exposed
    assert row.leaking is not None and row.leaking.count == 0


def test_what_another_update_yields_as_well_is_never_the_strongest(tmp_path: Path) -> None:
    """Rule 12: a constant image gains 18 dB where the public images are dark."""
    blind = [line(30.0, trial=t, other=30.0, attack="a_prior") for t in range(4)]
    sees = [line(15.0 + 0.2 * t, trial=t, other=9.0) for t in range(4)]
    rows = board(tmp_path, [*blind, *sees])
    assert [(row.attack, row.strongest) for row in rows] == [
        ("inverting_gradients", True),
        ("a_prior", False),
    ]
    verdict = judged(rows)
    assert verdict.strongest.attack == "inverting_gradients"
    assert verdict.gain is not None and verdict.gain.mean == pytest.approx(3.3)
    rows = board(tmp_path, blind)
    assert [row.strongest for row in rows] == [False]
    verdict = judged(rows)
    assert verdict.level == "unseen"
    assert verdict.gain is not None and verdict.gain.mean == 0.0  # what is due to this update
    assert "18.0" not in _describe_evidence(verdict)
    # A trial that no attack gains by chance is proof that it sees.
    rare = [line(60.0 if t == 1 else 12.0, trial=t, other=12.0) for t in range(4)]
    (row,) = board(tmp_path, rare)
    assert row.over_other is not None and row.over_other.certain < 0
    assert row.strongest and not row.is_uninformed


def test_a_single_trial_says_that_it_has_no_control(tmp_path: Path) -> None:
    """Rule 12: beside the number, in every output, and with what to do."""
    rows = board(tmp_path, [line(16.0, other=None)])
    assert rows[0].no_control == "no control: one trial"
    table = render(rows, width=100)
    (shown,) = [text for text in table.splitlines() if text.startswith("none")]
    assert "one trial" in shown and "no control" in table
    assert "WARNING: inverting_gradients: no control: one trial" in re.sub(r"\s+", " ", table)
    assert "observe.trials" in table
    (record,) = csv.DictReader(io.StringIO(render(rows, "csv")))
    assert record["no_control"] == "no control: one trial"
    assert any("no control: one trial" in w for w in json.loads(render(rows, "json"))["warnings"])
    assert "(no control: one trial)" in describe_control(positive_controls(rows)[0])
    assert judged(rows).level == "undecided"
    page = write_report(tmp_path).read_text()
    assert "<td>no control: one trial</td>" in page
    rows = board(tmp_path, [line(16.0, other=None), line(None, trial=1)])
    assert rows[0].no_control == "no control: one trial worked"
    rows = board(tmp_path, [line(16.0), line(16.0, trial=1)])
    assert rows[0].no_control is None and "no control: one" not in told(tmp_path, rows)


def of_labels(share: float, other: float | None, **case: Any) -> dict[str, Any]:
    """A results row of an attack on labels alone, of which a fifth is guessed."""
    row = line(0.0, attack="label_inference", label_accuracy=share, **case)
    row["metrics"]["psnr"] = None
    row["control"] = {"other_update": None if other is None else {"label_accuracy": other}}
    return row


@pytest.mark.parametrize(
    ("other", "trials", "level"),
    [(0.9, 5, "unknown"), (0.85, 5, "unknown"), (0.2, 5, "labels"), (None, 5, "unknown"),
     (0.2, 1, "unknown")],
)  # fmt: skip
def test_labels_that_any_update_yields_are_no_leak(
    tmp_path: Path, other: float | None, trials: int, level: str
) -> None:
    """Rule 12: who always answers one class is right wherever a client has little else."""
    rows = board(tmp_path, [of_labels(0.9, other, trial=trial) for trial in range(trials)])
    verdict = judged(rows)
    assert verdict.level == level
    assert verdict.told["labels"].is_informed == (other == 0.2)
    assert rows[0].is_uninformed == (other == 0.9)


def test_memberships_that_any_release_yields_are_no_leak(tmp_path: Path) -> None:
    """Rule 12: the same scores, whatever the release."""
    for other, level in ((0.9, "unknown"), (0.5, "membership")):
        lines = [line(0.0, trial=t, attack="m", membership_auc=0.9 + 0.01 * t) for t in range(4)]
        for row in lines:
            row["metrics"]["psnr"], row["release"] = None, {"kind": "sketch"}
            row["baseline"]["membership_auc"] = 0.5
            row["control"] = {"other_update": {"membership_auc": other}}
        rows = board(tmp_path, lines)
        verdict = judged(rows)
        assert verdict.level == level
        assert verdict.told["membership"].is_informed == (other == 0.5)
        assert positive_controls(rows)[0].status == ("passed" if other < 0.9 else "failed")


def test_the_best_of_many_attacks_has_to_be_better(tmp_path: Path) -> None:
    """Rule 13: its interval allows for the choice, in the verdict and beside the bar."""
    gains = [3.2, 4.0, 4.6, 3.4, 4.3]
    lucky = [line(12.0 + gain, trial=t, other=2.0 + t / 9) for t, gain in enumerate(gains)]
    others = [
        line(11.0 + 0.1 * t, trial=t, attack=f"other {n}", other=8.0)
        for n in range(7)
        for t in range(5)
    ]
    alone = board(tmp_path, lucky)
    assert alone[0].gain is not None and alone[0].gain.certain > 3.0
    assert judged(alone).level == "leak"
    rows = board(tmp_path, [*lucky, *others])
    verdict = judged(rows)
    assert verdict.level == "partial"
    assert verdict.gain is not None and verdict.gain.low is not None
    assert verdict.gain.compared == 8
    low, high = student_interval(gains, confidence=1 - 0.05 / 8)
    assert (verdict.gain.low, verdict.gain.high) == pytest.approx((low, high))


def test_of_too_few_trials_the_best_of_many_is_no_leak(tmp_path: Path) -> None:
    """Rule 13: no interval allows for the choice, so that only what is no chance counts."""
    other = line(11.0, attack="other", other=8.0)
    assert judged(board(tmp_path, [line(16.0)])).level == "leak"
    verdict = judged(board(tmp_path, [line(16.0), other]))
    assert verdict.level == "unseen"
    assert verdict.leaking and (verdict.leaking.count, verdict.leaking.n) == (1, 1)
    assert judged(board(tmp_path, [line(22.5), other])).level == "leak"


def test_a_guess_of_few_public_images_is_called_poor(tmp_path: Path) -> None:
    """Rule 12: with their number, what it means and what to do; and of enough nothing is said."""
    lines = [line(20.0 + t, trial=t, batch_size=4) for t in range(3)]
    for row in lines:
        row["baseline"] |= {"public": 1, "public_per_image": 0.25}
    rows = board(tmp_path, lines)
    for text in (
        told(tmp_path, rows),
        " ".join(json.loads(render(rows, "json"))["warnings"]),
        next(iter(csv.DictReader(io.StringIO(render(rows, "csv")))))["warning"],
        " ".join(describe_cautions(judged(rows))),
    ):
        assert "learned from 1 public image, 0.25 for each image" in text
        assert "20 are needed" in text and "more test images" in text
    wide = [line(20.0, batch_size=2) | {"baseline": {"public": 1, "public_per_image": 0.5}}]
    (warning,) = json.loads(render(board(tmp_path, [*lines, *wide]), "json"))["warnings"]
    assert warning.startswith("batch size 2, 4, at worst: ") and "0.25 for each" in warning
    for row in lines:
        row["baseline"] |= {"public": 80, "public_per_image": 20.0}
    assert "public images, " not in told(tmp_path, board(tmp_path, lines))


def test_an_interval_is_of_as_many_networks_and_clients_as_were_attacked(tmp_path: Path) -> None:
    """Trials of one run share weights and partition; only other runs and clients vary them."""
    trials = [line(20.0 + t, trial=t) for t in range(3)]
    (one,) = board(tmp_path, trials)
    assert (one.networks, one.clients, one.n) == (1, 1, 3)
    for row in trials:
        row["client"] = row["trial"]
    (several,) = board(tmp_path, trials)
    assert (several.networks, several.clients) == (1, 3)
    folders = [tmp_path / row["defense"]["name"] / str(row["trial"]) for row in trials]
    for folder, row in zip(folders, trials, strict=True):
        folder.mkdir(parents=True)
        board(folder, [row | {"client": 0}])
    (runs,) = rows = leaderboard_rows(folders)
    assert (runs.networks, runs.clients, runs.n) == (3, 3, 3)
    assert len({one.population, several.population, runs.population}) == 3
    for found in (one, runs):
        assert found.population in " ".join(render([found], width=200).split())
    assert population_of([*rows, one]) not in (one.population, runs.population)


def test_copies_of_victims_among_public_images_are_counted_and_told(tmp_path: Path) -> None:
    """Rule 12: whoever has them may know a victim without any update, however many others."""
    lines = [line(20.0 + t, trial=t, batch_size=4) for t in range(3)]
    for row, copies in zip(lines, (0, 1, 2), strict=True):
        row["baseline"] |= {"public": 400, "public_per_image": 100.0, "near_copies": copies}
    rows = board(tmp_path, lines)
    assert rows[0].near_copies == 3 and rows[0].guess_problem in rows[0].warnings
    assert len(json.loads(render(rows, "json"))["warnings"]) == 1
    for row in lines:
        row["baseline"]["near_copies"] = 0
    assert board(tmp_path, lines)[0].guess_problem is None


def test_features_that_are_guessed_as_well_are_no_leak_and_no_control(tmp_path: Path) -> None:
    """Rule 12: of a single trial, where no other update tells."""
    for error, status, level in ((0.22, "failed", "unseen"), (0.09, "passed", "features")):
        row = of_features(error, other=None)
        row["baseline"]["subspace_error"] = 0.2
        rows = board(tmp_path, [row])
        (control,) = positive_controls(rows)
        assert control.status == status
        assert "no control: one trial" in describe_control(control)
        assert judged(rows).level == level


def test_a_masked_vector_is_told_from_an_update(tmp_path: Path) -> None:
    """Behind a secure sum the server's rows are of masked vectors; behind `aggregate` are none."""

    def seen(vantage: str, defense: str) -> dict[str, Any]:
        return {
            **line(12.0, defense=defense, stack=[{"name": "clip", "parameters": {"norm": 1.0}}]),
            "vantage": vantage,
        }

    rows = board(
        tmp_path,
        [
            line(20.0),
            seen("server", "clipped"),
            seen("server", "secure"),
            seen("aggregate", "secure"),
            seen("aggregate", "plain"),
        ],
    )
    assert [(row.defense, row.vantage) for row in rows if row.masked] == [("secure", "server")]
    named = {row.attack_on for row in rows if row.defense == "secure"}
    assert named == {f"{rows[0].attack} (masked)", f"{rows[0].attack} (aggregate)"}
    text = render(rows, width=120)
    assert text.count(f"{rows[0].attack} masked") == 1
    assert "masked: on a client's part of a secure sum" in text


def test_rounds_without_an_update_are_told(tmp_path: Path) -> None:
    """The accuracy behind closed sums is that of the model at its start."""
    board(tmp_path, [line(20.0)])
    rounds = [
        {"defense": stack, "round": round, "participants": [0, 1], "aggregated": count}
        for stack, counts in (("none", (2, 2)), ("secure", (0, 2)))
        for round, count in enumerate(counts, start=1)
    ]
    text = "".join(json.dumps(each) + "\n" for each in rounds)
    (tmp_path / "rounds.jsonl").write_text(text)
    (told,) = standing_still(load_runs([tmp_path]))
    assert told.startswith("secure: the model stayed as it was in 1 of 2 rounds")
