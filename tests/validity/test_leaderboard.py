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
from fedsim.report import page as module
from fedsim.report.recovered import accused
from fedsim.report.verdict import verdicts
from fedsim.scoring import accuracy

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
    (verdict,) = verdicts(rows, control)
    assert verdict.level == "leak"


def test_a_trial_without_images_counts_as_guessing(tmp_path: Path) -> None:
    """Rule 11: an attack that answers labels alone for once does not hide its pictures."""
    lines = [line(30.0, trial=trial, label_accuracy=1.0) for trial in range(5)]
    without = line(30.0, trial=5, guess=None, label_accuracy=1.0)
    without["metrics"] |= {"psnr": None}
    (row,) = board(tmp_path, [*lines, without])
    assert row.gain is not None
    assert row.gain.mean == pytest.approx(5 * 18 / 6)
    assert row.label_gain is not None
    assert row.label_gain.mean == pytest.approx(0.8)


def test_exact_pictures_are_no_protection_though_a_trial_was_lost(tmp_path: Path) -> None:
    """The interval of 48, 48, 48 and 0 dB reaches below 0."""
    lines = [line(60.0, trial=trial, guess=12.0, other=12.0) for trial in range(3)]
    lost = {**line(0.0, trial=3), "status": "failed", "reason": "lost", "metrics": None}
    behind = [{**row, "defense": {"name": "loses", "stack": [{"name": "x"}]}} for row in lines]
    rows = board(tmp_path, [*lines, *behind, {**lost, "defense": behind[0]["defense"]}])
    (control,) = positive_controls(rows)
    (verdict,) = [v for v in verdicts(rows, control) if v.strongest.defense == "loses"]
    assert verdict.strongest.gain is not None and verdict.strongest.gain.certain < 0
    assert verdict.level == "partial"
    assert "in some trials, the best by 48.0 dB" in verdict.sentence


def test_every_line_carries_the_guess_and_the_other_update(tmp_path: Path) -> None:
    """Rule 12: gain over the zero-information guess, trial by trial, and the other update."""
    (row,) = board(
        tmp_path,
        [line(20.0, guess=15.0, other=19.0), line(10.0, trial=1, guess=5.0, other=9.5)],
    )
    assert row.baseline["psnr"] == pytest.approx(10.0)
    assert row.gain is not None
    assert (row.gain.mean, row.gain.std) == (5.0, 0.0)  # paired: every trial gained exactly 5 dB
    assert row.other_update is not None
    assert row.other_update.mean == pytest.approx(14.25)
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
    board(tmp_path, [line(22.0, trial=i, other=22.0 + 0.1 * (-1) ** i) for i in range(6)])
    text = re.sub(r"\s+", " ", write_report(tmp_path).read_text())
    assert "Images leak" not in text
    assert "as much so with another client’s update" in text


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
    assert "2.9 dB" in control.reason
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
    assert "INVALID in part" in page and "<strong>INVALID</strong>" not in page


def test_a_failed_attack_is_never_the_strongest(tmp_path: Path) -> None:
    """Its guess is no attack: above working ones of negative gain it would say that none works."""
    failed, worse = (
        line(None, attack="idlg", defense="dp", stack=DP),
        line(8.0, defense="dp", stack=DP),
    )
    rows = board(tmp_path, [line(30.0), failed, worse])
    behind = [row for row in rows if row.defense == "dp"]
    assert [(row.attack, row.strongest) for row in behind] == [
        ("inverting_gradients", True),
        ("idlg", False),
    ]
    assert behind[0].gain is not None and behind[0].gain.mean < 0
    (control,) = positive_controls(rows)
    assert verdicts(rows, control)[1].strongest.attack == "inverting_gradients"


def test_where_every_attack_failed_none_is_marked(tmp_path: Path) -> None:
    rows = board(tmp_path, [line(30.0), line(None, defense="dp", stack=DP)])
    assert [row.strongest for row in rows] == [True, False]
    (control,) = positive_controls(rows)
    verdict = verdicts(rows, control)[1]
    assert (verdict.level, verdict.headline) == ("failed", "Attacks failed")
    assert "no protection measured" in verdict.sentence


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
    (control,) = positive_controls(rows)
    verdict = verdicts(rows, control)[1]
    assert "3.7 points below no defense, which 80 test examples do not tell apart" in (
        verdict.accuracy
    )


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
    assert "fine leaves a span error of 0.200" in control.reason
    (control,) = positive_controls(board(tmp_path, [of_features(0.6)]))
    assert control.status == "failed"


def test_features_leak_by_the_upper_end_of_the_interval(tmp_path: Path) -> None:
    """Rule 13: three lucky trials of four are not enough, though their mean is."""
    for errors, level in (([0.4] * 4, "features"), ([0.2, 0.2, 0.2, 1.0], "unseen")):
        rows = board(tmp_path, [of_features(error, trial=i) for i, error in enumerate(errors)])
        (control,) = positive_controls(rows)
        assert control.status == "passed"
        (verdict,) = verdicts(rows, control)
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
    (found,) = accused(rows, load_runs([tmp_path]), {"none": 0})
    assert found.rates == [(0, 0), (0, 0.5), (0.5, 0.5), (0.5, 1), (1, 1)]


@pytest.mark.parametrize("trials", [1, 2])
def test_a_small_gain_of_too_few_trials_is_no_leak(tmp_path: Path, trials: int) -> None:
    """Rule 13: half of all attacks that know nothing gain something in one trial."""
    rows = board(tmp_path, [line(13.0, trial=trial, other=12.5) for trial in range(trials)])
    (verdict,) = verdicts(rows, positive_controls(rows)[0])
    assert verdict.level == "unseen"
    assert "did not reliably beat guessing" in verdict.sentence


def test_an_attack_that_failed_has_recovered_no_label(tmp_path: Path) -> None:
    """Rule 11: what counts as the guess is not told as a find."""
    rows = board(tmp_path, [line(None, trial=trial) for trial in range(3)])
    (verdict,) = verdicts(rows, positive_controls(rows)[0])
    assert verdict.labels is None


def test_features_of_any_update_are_no_leak_and_no_control(tmp_path: Path) -> None:
    """Rule 12: features of noise span most of a batch's, whatever the update."""
    lines = [of_features(0.22 + 0.01 * (trial % 2), trial=trial, other=None) for trial in range(4)]
    for trial, row in enumerate(lines):
        row["control"] = {"other_update": {"subspace_error": 0.22 + 0.01 * (trial % 3 > 0)}}
    rows = board(tmp_path, lines)
    (control,) = positive_controls(rows)
    assert control.status == "failed"
    assert "another update" in control.reason
    (verdict,) = verdicts(rows, control)
    assert verdict.level == "unseen"
    assert "another update" in verdict.sentence


def test_a_prior_that_draws_the_same_from_any_update_is_no_control(tmp_path: Path) -> None:
    """Rules 12 and 15: a gain that rests on no update does not show that attacks work."""
    blind = [line(30.0, trial=i, other=30.0, attack="a_prior") for i in range(4)]
    rows = board(tmp_path, [*blind, line(13.0, defense="dp", stack=DP)])
    assert_invalid(rows, tmp_path, "another update")
    sees = [line(20.0, trial=i) for i in range(4)]
    (control,) = positive_controls(board(tmp_path, [*blind, *sees]))
    assert control.status == "passed"
    assert "inverting_gradients" in control.reason


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


def test_theory_is_scaled_to_the_undefended_cells(tmp_path: Path) -> None:
    """What it predicts is known up to a constant: that which meets what was measured undefended."""
    lines = [of_features(0.2), of_features(0.8, defense="dp", stack=DP)]
    for row, rate in zip(lines, (10.0, 30.0), strict=True):
        row["theory"] = {"tensor_rate": rate}
    errors = module._errors(board(tmp_path, lines), {"inverting_gradients": 1})
    assert [(one.label, one.predicted) for one in errors] == [
        ("none", [(1, pytest.approx(0.2))]),
        ("dp", [(1, pytest.approx(0.6))]),
    ]


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

    save_grid(tmp_path / "grid.png", truth, faint, factor=1)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "grid.png"))[34:], shown)

    board(tmp_path, [line(20.0)])
    path = tmp_path / "reconstructions/none/inverting_gradients/round-0001"
    path.mkdir(parents=True)
    save_file({"truth": truth, "reconstruction": faint}, path / "client-0000-b1-t0.safetensors")
    uris = re.findall(r'src="data:image/png;base64,([^"]+)"', write_report(tmp_path).read_text())
    assert len(uris) == 2
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(uris[1]))))
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
    uri = re.findall(r'src="data:image/png;base64,([^"]+)"', write_report(tmp_path).read_text())[1]
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
    assert re.search(r"factored_inversion <small>planted", page)


def test_an_honest_control_does_not_make_a_planted_table_valid(tmp_path: Path) -> None:
    weak = [behind("planted", 13.0, trial=trial) for trial in range(3)]
    strong = [behind("honest", 30.0, trial=trial) for trial in range(3)]
    rows = board(tmp_path, [*weak, *strong])
    (reason,) = invalid_reasons(rows)
    assert "planted" in reason
