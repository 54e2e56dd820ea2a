"""An honest leaderboard: pictures, failures, baselines, spread, controls (rules 10 to 15)."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answer_rows import Lines, save, trial
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
from fedsim.report.judge import Control, Verdict, judge
from fedsim.report.messages import _describe_evidence, describe_cautions, describe_control
from fedsim.report.row import population_of
from fedsim.scoring import accuracy, student_interval


def line(
    psnr: float | None, *, guess: float | None = 12.0, other: float | None = 9.0, **case: Any
) -> dict[str, Any]:
    """A results row, undefended by default; `psnr` None is a failed trial."""
    row = trial(psnr, **{"defense": "none", **case})
    row["baseline"] |= {"psnr": guess, "ssim": 0.1, "rmse": 0.25}
    row["control"] = {"other_update": None if other is None else {"psnr": other}}
    return row


def lines(values: Sequence[float | None], **case: Any) -> Lines:
    """One row for each PSNR."""
    return [line(value, trial=number, **case) for number, value in enumerate(values)]


def of(name: str, value: float, other: float | None = None, guess: float | None = None) -> Lines:
    """A row of an attack that answers this metric alone; without another update by default."""
    row = line(0.0, attack=name)
    row["metrics"] = {name: value}
    row["baseline"] |= {name: guess} if guess is not None else {}
    row["control"] = {"other_update": None if other is None else {name: other}}
    row["release"] = {"kind": "sketch"} if name == "membership_auc" else None
    return [row]


def numbered(rows: Lines) -> Lines:
    """These rows as trials that differ."""
    return [row | {"trial": number, "seed": number} for number, row in enumerate(rows)]


def board(folder: Path, rows: Lines) -> list[LeaderboardRow]:
    return leaderboard_rows([save(folder, rows)])


def records(rows: list[LeaderboardRow]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render(rows, "csv"))))


def mean(row: LeaderboardRow, name: str = "psnr") -> float:
    summary = row.metrics[name]
    assert summary is not None
    return summary.mean


def judged(rows: list[LeaderboardRow], defense: str = "none") -> Verdict:
    (found,) = [v for v in judge(rows).verdicts if v.defense == defense]
    return found


def control_of(rows: list[LeaderboardRow]) -> Control:
    (control,) = positive_controls(rows)
    return control


def told(folder: Path, rows: list[LeaderboardRow]) -> str:
    """All that a reader is shown: the table and the page, in one line."""
    page = re.sub(r"</?(?:span|button|wbr)\b[^>]*>", "", write_report(folder).read_text())
    return re.sub(r"\s+", " ", render(rows, width=200) + page)


def test_failures_count_as_guessing(tmp_path: Path) -> None:
    """Rule 11: a failed trial is its row's zero-information guess, in every aggregate."""
    failed = [line(None, trial=1, guess=10.0), line(None, trial=2, guess=12.0)]
    (row,) = board(tmp_path, [line(20.0, ssim=0.9, rmse=0.1), *failed])
    assert (row.n_ok, row.n, row.failures) == (1, 3, {"it diverged": 2})
    assert mean(row) == pytest.approx((20 + 10 + 12) / 3)
    assert mean(row, "ssim") == pytest.approx((0.9 + 0.1 + 0.1) / 3)
    assert mean(row, "rmse") == pytest.approx((0.1 + 0.25 + 0.25) / 3)
    assert row.metrics["psnr"] is not None and row.metrics["psnr"].median == 12.0
    assert row.gain is not None
    assert (row.gain.mean, row.gain.n) == (pytest.approx((20 - 12) / 3), 3)
    assert "1/3" in render([row])
    (record,) = records([row])
    assert (record["n_ok"], record["n"]) == ("1", "3")


def test_a_failure_without_a_guess_leaves_no_mean_and_counts_as_no_gain(tmp_path: Path) -> None:
    """Rule 11: an update that was lost does not hide what the others leaked."""
    (row,) = rows = board(tmp_path, [*lines([30.0] * 5), line(None, trial=5, guess=None)])
    assert row.metrics["psnr"] is None and row.gain is not None
    assert (row.gain.n, row.gain.mean) == (6, pytest.approx(5 * 18 / 6))
    assert (control_of(rows).status, judged(rows).level) == ("passed", "leak")


def test_a_trial_without_images_counts_as_guessing(tmp_path: Path) -> None:
    """Rule 11: an attack that answers labels alone for once does not hide its pictures."""
    without = line(30.0, trial=5, guess=None, label_accuracy=1.0)
    without["metrics"] |= {"psnr": None}
    (row,) = board(tmp_path, [*lines([30.0] * 5, label_accuracy=1.0), without])
    assert row.gain is not None and row.gain.mean == pytest.approx(5 * 18 / 6)
    assert row.gains["label_accuracy"].mean == pytest.approx(0.8)


def test_every_line_carries_the_guess_and_the_other_update(tmp_path: Path) -> None:
    """Rule 12: gain over the zero-information guess, trial by trial, and the other update."""
    pair = [line(20.0, guess=15.0, other=19.0), line(10.0, trial=1, guess=5.0, other=9.5)]
    (row,) = board(tmp_path, pair)
    assert row.baseline["psnr"] == pytest.approx(10.0)
    assert row.gain is not None and row.over_other is not None
    assert (row.gain.mean, row.gain.std) == (5.0, 0.0)  # paired: every trial gained exactly 5 dB
    assert row.others["psnr"].mean == pytest.approx(14.25)
    assert row.over_other.mean == pytest.approx(0.75)
    for text in (render([row], "json"), render([row], "csv")):
        assert "over_other" in text and "gain" in text
    heading = next(text for text in render([row]).splitlines() if text.startswith("defense"))
    assert "gain" in heading and "other" in heading


def test_mean_median_tail_and_interval_stand_side_by_side(tmp_path: Path) -> None:
    """Rule 13: several metrics, the worst case and Student's interval beside the mean (and 7)."""
    values = [10.0, 11.0, 10.5, 30.0, 9.5, 10.2]
    rows = [line(v, trial=i, ssim=v / 60, rmse=1 / v, lpips=5 / v) for i, v in enumerate(values)]
    rows[0]["per_image"] = {"psnr": [4.0, 44.0]}
    (row,) = board(tmp_path, rows)
    summary = row.metrics["psnr"]
    assert summary is not None and summary.low is not None and summary.high is not None
    assert (summary.mean, summary.median) == pytest.approx((np.mean(values), 10.35))
    assert row.worst["psnr"] == 44.0  # the worst image, though its batch's mean is low
    found = [row.worst[name] for name in ("ssim", "rmse", "lpips")]
    assert found == pytest.approx([0.5, 1 / 30, 5 / 30])
    # The outlier makes the interval wide and lopsided, as it should be.
    assert summary.low < summary.mean < summary.high
    assert summary.high - summary.mean == pytest.approx(summary.mean - summary.low)
    (record,) = records([row])
    for name in ("psnr", "ssim", "rmse", "lpips"):
        for part in ("mean", "low", "high", "median", "worst"):
            assert record[f"{name}_{part}"], (name, part)


SMALLER = [line(12.5), line(20.0) | {"batch_size": 8}]
BLIND = lines([30.0] * 4, other=30.0, attack="a_prior")
SEES = lines([20.0] * 4)
LABELS = of("label_accuracy", 1.0)

CONTROLS: dict[str, tuple[Lines, str, str]] = {
    # Case -> rows, the status, and words of it; all are of rule 15.
    "below what is asked": ([line(14.9)], "failed", "2.9 dB"),
    "no undefended stack": ([line(30.0, defense="dp")], "absent", "no positive control"),
    "the smallest batch fails": (SMALLER, "failed", "0.5 dB"),
    "the smallest batch works": (
        [line(20.0), line(12.5) | {"batch_size": 8}], "passed", "8.0 dB"),
    "labels are no pictures": ([*LABELS, line(12.0, defense="dp")], "failed", ""),
    "pictures beside labels": ([*LABELS, line(15.5)], "passed", ""),
    "one lucky trial among failures": (lines([20.0, None, None, None]), "failed", ""),
    "features, by the best": (
        [*of("subspace_error", 0.9), *(row | {"attack": {"name": "fine", "label": "fine"}}
                                       for row in of("subspace_error", 0.2))],
        "passed", "fine leaves a span error of 0.200"),
    "features that none recovers": (of("subspace_error", 0.6), "failed", ""),
    "features guessed as well": (
        of("subspace_error", 0.22, guess=0.2), "failed", "no control: one trial"),
    "features better than guessed": (
        of("subspace_error", 0.09, guess=0.2), "passed", "no control: one trial"),
    "features of any update": (
        numbered([*of("subspace_error", 0.22, 0.22), *of("subspace_error", 0.23, 0.23)] * 2),
        "failed", "another update"),
    "a prior": ([*BLIND, line(13.0, defense="dp")], "failed", "another update"),
    "what sees beside a prior": ([*BLIND, *SEES], "passed", "inverting_gradients"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTROLS)
def test_a_positive_control(case: str, tmp_path: Path) -> None:
    rows, status, words = CONTROLS[case]
    control = control_of(board(tmp_path, rows))
    assert control.status == status
    assert words in describe_control(control)


@pytest.mark.parametrize("case", ["below what is asked", "no undefended stack", "a prior"])
def test_where_the_control_does_not_pass_every_output_is_invalid(case: str, tmp_path: Path) -> None:
    """Rule 15: if the undefended stack is not beaten, low figures under a defense prove nothing."""
    found, _, why = CONTROLS[case]
    rows = board(tmp_path, [*found, line(12.0, defense="dp", trial=9)])
    assert any(why in reason for reason in invalid_reasons(rows))
    table = re.sub(r"\s+", " ", render(rows))
    assert table.strip().startswith("INVALID") and why in table
    document = json.loads(render(rows, "json"))
    assert document["valid"] is False and why in " ".join(document["invalid_reasons"])
    for record in records(rows):
        assert record["valid"] == "False" and why in record["invalid_reason"]
    page = re.sub(r"\s+", " ", write_report(tmp_path).read_text())
    assert page.count("<strong>INVALID</strong>") >= 2 and why in page


def test_each_comparison_is_judged_by_itself(tmp_path: Path) -> None:
    """Rule 15: one whose attacks do not work is INVALID in every output, and another is not."""
    bad = line(12.1) | {"variant": {"training.local.mode": "eval"}}
    rows = board(tmp_path, [line(30.0), bad])
    (reason,) = invalid_reasons(rows)
    assert "training.local.mode=eval" in reason and "batch size 1" in reason
    table = render(rows, width=300).splitlines()
    marked = "INVALID  s (training.local.mode=eval), faces, lenet"
    assert [text for text in table if text.startswith("INVALID  ")] == [marked]
    assert "s, faces, lenet" in table and "\n".join(table).count("INVALID: ") == 1
    document = json.loads(render(rows, "json"))
    assert [row["valid"] for row in document["rows"]] == [True, False]
    assert document["rows"][0]["invalid_reason"] == ""
    assert [record["valid"] for record in records(rows)] == ["True", "False"]
    assert "try more iterations" in records(rows)[1]["invalid_reason"]
    page = write_report(tmp_path).read_text()
    assert "INVALID in part" in page and page.count("<strong>INVALID</strong>") == 1


def test_a_failed_attack_is_never_the_strongest(tmp_path: Path) -> None:
    """Its guess is no attack: above working ones of negative gain it would say that none works."""
    failed = line(None, attack="idlg", defense="dp")
    rows = board(tmp_path, [line(30.0), failed, line(8.0, defense="dp", other=7.0)])
    behind = [row for row in rows if row.defense == "dp"]
    assert [(row.attack, row.strongest) for row in behind] == [
        ("inverting_gradients", True),
        ("idlg", False),
    ]
    assert judged(rows, "dp").strongest.attack == "inverting_gradients"
    rows = board(tmp_path, [line(30.0), failed])
    assert [row.strongest for row in rows] == [True, False]


def test_where_every_trial_failed_no_figure_of_the_guess_is_shown(tmp_path: Path) -> None:
    """Its guess has 77.0 dB, and by chance all labels."""
    failed = line(None, defense="dp", guess=77.0)
    failed["baseline"]["label_accuracy"] = 1.0
    rows = board(tmp_path, [line(30.0, ssim=0.9, label_accuracy=1.0), failed])
    assert rows[1].gain is not None and (rows[1].gain.mean, rows[1].gain.max) == (0.0, 0.0)
    assert mean(rows[1]) == 77.0 and rows[1].metrics["label_accuracy"] is not None
    text = render(rows, width=200)
    (cells,) = [each for each in text.splitlines() if " 0/1 " in each]
    assert "77.0" not in cells and "+0.0" not in cells and "0/1 (" not in cells
    assert "100%" not in cells and "where all trials failed" in " ".join(text.split())
    html = write_report(tmp_path).read_text(encoding="utf-8")
    for page in (html, dossier_of(load_runs([tmp_path]), tmp_path)):
        shown = [each for each in re.findall(r"<tr.*?</tr>", page, re.S) if ">0/1<" in each]
        assert shown and all("100%" not in each and "77.0" not in each for each in shown)


def evaluated(share: float, loss: float | None = 1.4, **case: Any) -> dict[str, Any]:
    """A results row of a model that was tested on 80 images of four classes."""
    tested = {"test_accuracy": share, "test_loss": loss, "test_examples": 80, "test_chance": 0.25}
    return line(30.0, **case) | {"utility": tested}


@pytest.mark.parametrize(
    ("share", "loss", "why"),
    [
        (0.25, 1.4, "the model learned nothing"),
        (0.34, 1.4, "the model learned nothing"),  # 25 to 45%: 80 images do not show more
        (0.25, 40.0, "training diverged"),
        (0.5, 40.0, None),
    ],
)
def test_a_model_at_chance_is_said_to_be(
    share: float, loss: float | None, why: str | None, tmp_path: Path
) -> None:
    rows = board(tmp_path, [evaluated(share, loss)])
    table = re.sub(r"\s+", " ", render(rows, width=200))
    (record,) = records(rows)
    page = write_report(tmp_path).read_text()
    for said in (render(rows, "json"), record["warning"], table, page):
        text = said.lower()
        assert why is None or why in text
        assert why is not None or ("learned nothing" not in text and "diverged: " not in text)
    assert "accuracy on 80 test examples (chance 25%)" in table and "80 test examples" in page
    assert record["test_examples"] == "80" and record["test_chance"] == "0.25"
    assert float(record["test_accuracy_low"]) < share < float(record["test_accuracy_high"])


def test_a_difference_within_what_the_test_set_shows_is_said_to_be(tmp_path: Path) -> None:
    """3 of 80 images are no price."""
    costs = judged(board(tmp_path, [evaluated(0.9), evaluated(0.8625, defense="dp")]), "dp").costs
    assert (costs.points, costs.is_apart) == (pytest.approx(-3.75), False)


def test_wilsons_interval_is_wilsons() -> None:
    """Of 20 of 80: (p + z²/2n ± z sqrt(pq/n + z²/4n²)) / (1 + z²/n)."""
    found, z, n = accuracy(0.25, 80, 0.25), 1.959963984540054, 80
    center, half = 0.25 + z * z / 2 / n, z * math.sqrt(0.1875 / n + z * z / 4 / n**2)
    assert found.low == pytest.approx((center - half) / (1 + z * z / n))
    assert found.high == pytest.approx((center + half) / (1 + z * z / n))


def members(other: float) -> Lines:
    """Releases whose members are told, and another one's as well."""
    areas = (0.9, 0.91, 0.92, 0.93)
    return numbered([row for area in areas for row in of("membership_auc", area, other, 0.5)])


LUCKY = [line(12.0 + g, trial=t, other=2.0 + t / 9) for t, g in enumerate([3.2, 4, 4.6, 3.4, 4.3])]
WEAK = [row for n in range(7) for row in lines([11, 11.1, 11.2, 11.3], attack=f"{n}", other=8.0)]
STEADY = lines([12.1, 11.9] * 5, attack="steady")

LEVELS: dict[str, tuple[Lines, str]] = {
    "exact pictures, and one trial lost": ([*lines([60.0] * 3), line(None, trial=3)], "partial"),
    "one exact picture of ten": ([*lines([12.0] * 4 + [60.0] + [12.0] * 5), *STEADY], "partial"),
    "below its own mean": ([*lines([6.0] * 4 + [60.0] + [6.0] * 5), *STEADY], "partial"),
    "a gain below chance in one of ten": (lines([11.9] * 4 + [17.0] + [11.9] * 5), "unseen"),
    "a small gain of one trial": (lines([13.0], other=12.5), "unseen"),
    "a small gain of two": (lines([13.0, 13.0], other=12.5), "unseen"),
    "one trial without a control": (lines([16.0], other=None), "undecided"),
    "an exact one without a control": (lines([48.0], other=None), "undecided"),
    "the best of one": (lines([16.0]), "leak"),
    "the best of two by one trial": ([*lines([16.0]), line(11.0, attack="o", other=8.0)], "unseen"),
    "by what is no chance": ([*lines([22.5]), line(11.0, attack="o", other=8.0)], "leak"),
    "a certain gain": (LUCKY, "leak"),
    "the best of eight": ([*LUCKY, *WEAK], "partial"),
    "features of every trial": (numbered(of("subspace_error", 0.4) * 4), "features"),
    "features of three lucky trials of four": (
        numbered([*of("subspace_error", 0.2) * 3, *of("subspace_error", 1.0)]), "unseen"),
    "features guessed as well": (of("subspace_error", 0.22, guess=0.2), "unseen"),
    "features better than guessed": (of("subspace_error", 0.09, guess=0.2), "features"),
    "features of any update": (CONTROLS["features of any update"][0], "unseen"),
    "labels of this update": (numbered(of("label_accuracy", 0.9, 0.2) * 5), "labels"),
    "labels of any update": (numbered(of("label_accuracy", 0.9, 0.9) * 5), "unknown"),
    "most labels of any update": (numbered(of("label_accuracy", 0.9, 0.85) * 5), "unknown"),
    "labels without a control": (numbered(of("label_accuracy", 0.9) * 5), "unknown"),
    "labels of one trial": (of("label_accuracy", 0.9, 0.2), "unknown"),
    "members of this release": (members(0.5), "membership"),
    "members of any release": (members(0.9), "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEVELS)
def test_what_leaks_for_certain(case: str, tmp_path: Path) -> None:
    """Rules 12 and 13: neither luck, nor the choice of the best, nor what was known is a leak."""
    found, level = LEVELS[case]
    rows = board(tmp_path, found)
    verdict = judged(rows)
    assert verdict.level == level
    assert verdict.strongest.attack != "steady"
    if verdict.told:
        ((_, shown),) = verdict.told.items()
        assert shown.is_informed == ("of this" in case or "of one trial" in case)
    if case.startswith("members"):
        assert control_of(rows).status == ("passed" if level == "membership" else "failed")


def test_what_was_measured_differently_is_not_averaged(tmp_path: Path) -> None:
    """Two clients of one trial are two measurements, a copy is none, and a mean over several
    releases is another case than a single one."""
    other, many = line(10.0) | {"client": 1}, line(30.0) | {"releases": 4}
    rows = board(tmp_path, [line(20.0), other, line(20.0), many])
    assert [(row.n, mean(row)) for row in rows] == [(1, 30.0), (2, 15.0)]


def stored(folder: Path, number: int = 0, **tensors: torch.Tensor) -> None:
    """Keeps a reconstruction of the trial with this number."""
    (row,) = load_runs([folder])[0].rows[:1]
    path = folder / f"reconstructions/none/{row.attack.label}/round-0001"
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / f"client-0000-b1-t{number}.safetensors")


def test_who_is_accused_first_is_the_one_of_highest_score(tmp_path: Path) -> None:
    """The curve of the report's figure starts at the scores that accuse most."""
    rows = board(tmp_path, of("membership_auc", 0.75, guess=0.5))
    truth = torch.tensor([False, True, False, True])
    stored(tmp_path, membership=torch.tensor([-1.0, 3.0, 1.0, 0.0]), members=truth)
    (found,) = _list_accused(rows, load_runs([tmp_path]), {"none": 0})
    assert found.points == [(0, 0), (0, 0.5), (0.5, 0.5), (0.5, 1), (1, 1)]


def test_an_attack_that_failed_has_recovered_no_label(tmp_path: Path) -> None:
    """Rule 11: what counts as the guess is not told as a find."""
    assert "labels" not in judged(board(tmp_path, lines([None] * 3))).told


def test_of_claims_that_differ_the_weakest_stands(tmp_path: Path) -> None:
    """And of audits the one that found most: no run's luck makes a stack look more private."""
    rows = lines([20.0] * 3)
    for row, (epsilon, audited) in zip(rows, ((1.0, 0.9), (3.0, 0.4), (2.0, None)), strict=True):
        row["privacy"] = {"epsilon": epsilon, "delta": 1e-5 * epsilon, "audited_epsilon": audited}
    (found,) = board(tmp_path, rows)
    assert (found.epsilon, found.delta) == (3.0, pytest.approx(3e-5))
    assert found.audited_epsilon == 0.9
    rows[0]["privacy"]["epsilon"] = "inf"
    (found,) = board(tmp_path, rows)
    assert found.epsilon == math.inf


def pixels_of(uri: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri))))


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
    stored(tmp_path, truth=truth, reconstruction=faint)
    uris = re.findall(r'src="data:image/png;base64,([^"]+)"', write_report(tmp_path).read_text())
    assert len(uris) == 4, "truth and reconstruction, in the matrix and in its details"
    assert all(np.array_equal(pixels_of(uri), shown) for uri in uris[1::2])


def test_the_shown_trial_is_the_median_one(tmp_path: Path) -> None:
    """Rules 10 and 13: the report shows neither the luckiest nor the worst trial."""
    board(tmp_path, lines([25.0, 13.0, 18.0]))
    for number in range(3):
        shade = torch.full((1, 1, 8, 8), 0.1 + 0.2 * number)
        stored(tmp_path, number, truth=shade, reconstruction=shade.clone())
    page = write_report(tmp_path).read_text()
    (uri,) = set(re.findall(r'src="data:image/png;base64,([^"]+)"', page))
    assert pixels_of(uri).max() == round(255 * 0.5)


def of_server(server: str, values: Sequence[float], told: bool = True, **case: Any) -> Lines:
    """Rows whose model a server has planted, put an imprint module before, or left alone."""
    head = {"width": 8, "planted": 6 if server == "planted" else 0}
    parameters = {"head": head, **({"imprint": {"bins": 4}} if server == "modified" else {})}
    model = {"name": "convnet", "parameters": parameters}
    stated = server if told else "honest"
    return [row | {"model": model, "server": stated} for row in lines(values, **case)]


@pytest.mark.parametrize("told", [True, False], ids=["told by the row", "told by the model"])
def test_malicious_servers_are_marked_and_ranked_apart(tmp_path: Path, told: bool) -> None:
    """Rule 29: a planted head is another threat model, and the honest server comes first."""
    found = of_server("planted", [25.0, 26.0, 27.0], told, attack="factored_inversion")
    found += of_server("modified", [50.0] * 3, told, attack="imprint")
    rows = board(tmp_path, [*found, *of_server("honest", [17.0, 18.0, 19.0])])
    servers = ["honest", "planted", "modified"]
    assert [row.server for row in rows] == servers
    assert len({row.comparison for row in rows}) == 3 and all(row.strongest for row in rows)
    assert [record["server"] for record in records(rows)] == servers
    document = json.loads(render(rows, "json"))
    assert [row["server"] for row in document["rows"]] == servers
    table = render(rows, width=120)
    assert "factored_inversion (planted)" in table and "imprint (modified)" in table
    assert "inverting_gradients (" not in table
    assert "convnet, planted by a malicious server" in table
    page = write_report(tmp_path).read_text()
    assert "planted by a malicious server" in page
    assert "factored_inversion</button> <small>planted</small>" in page


def test_an_honest_control_does_not_make_a_planted_table_valid(tmp_path: Path) -> None:
    found = [*of_server("planted", [13.0] * 3), *of_server("honest", [30.0] * 3)]
    (reason,) = invalid_reasons(board(tmp_path, found))
    assert "planted" in reason


def test_ten_trials_without_a_gain_are_no_certainty(tmp_path: Path) -> None:
    """Rule 13: an interval from 0 to 0 would say that nothing leaks; up to 31% of trials may."""
    (row,) = rows = board(tmp_path, lines([12.0] * 10))
    assert row.gain is not None and (row.gain.low, row.gain.high) == (None, None)
    assert row.leaking is not None
    assert (row.leaking.count, row.leaking.n) == (0, 10)
    assert row.leaking.high == pytest.approx(1 - 0.025**0.1)
    text = told(tmp_path, rows)
    assert "0/10 (0–31)" in text and "0 of 10 (0 to 31%)" in text
    assert "12.0 [12.0, 12.0]" not in text
    (record,) = records(rows)
    assert (record["leaking_count"], record["leaking_n"]) == ("0", "10")
    assert json.loads(render(rows, "json"))["rows"][0]["leaking"]["high"] == row.leaking.high


def test_a_trial_is_exposed_by_what_it_gains_over_both(tmp_path: Path) -> None:
    """Rule 12: not by a gain over the guess here, and over another update there."""
    found = [line(30.0, other=30.0), *lines([0.0, 12.0, 12.0], other=12.0)[1:]]
    (row,) = board(tmp_path, [*found, line(12.0, trial=3, other=0.0)])
    assert row.gain and row.over_other and row.own_gain and row.leaking
    assert (row.gain.max, row.over_other.max, row.own_gain.max) == (18.0, 12.0, 0.0)
    assert not row.exposed and row.leaking.count == 0


def test_what_another_update_yields_as_well_is_never_the_strongest(tmp_path: Path) -> None:
    """Rule 12: a constant image gains 18 dB where the public images are dark."""
    sees = lines([15.0, 15.2, 15.4, 15.6])
    rows = board(tmp_path, [*BLIND, *sees])
    assert [(row.attack, row.strongest) for row in rows] == [
        ("inverting_gradients", True),
        ("a_prior", False),
    ]
    verdict = judged(rows)
    assert verdict.strongest.attack == "inverting_gradients"
    assert verdict.gain is not None and verdict.gain.mean == pytest.approx(3.3)
    rows = board(tmp_path, BLIND)
    verdict = judged(rows)
    assert ([row.strongest for row in rows], verdict.level) == ([False], "unseen")
    assert verdict.gain is not None and verdict.gain.mean == 0.0  # what is due to this update
    assert "18.0" not in _describe_evidence(verdict)
    # A trial that no attack gains by chance is proof that it sees.
    (row,) = board(tmp_path, lines([12.0, 60.0, 12.0, 12.0], other=12.0))
    assert row.over_other is not None and row.over_other.certain < 0
    assert row.strongest and not row.is_uninformed


def test_a_single_trial_says_that_it_has_no_control(tmp_path: Path) -> None:
    """Rule 12: beside the number, in every output, and with what to do."""
    why = "no control: one trial"
    rows = board(tmp_path, [line(16.0, other=None)])
    table = render(rows, width=100)
    (shown,) = [text for text in table.splitlines() if text.startswith("none")]
    assert "one trial" in shown and "observe.trials" in table
    assert f"WARNING: inverting_gradients: {why}" in re.sub(r"\s+", " ", table)
    assert records(rows)[0]["no_control"] == rows[0].no_control == why
    assert any(why in said for said in json.loads(render(rows, "json"))["warnings"])
    assert f"({why})" in describe_control(control_of(rows))
    assert f"<td>{why}</td>" in write_report(tmp_path).read_text()
    rows = board(tmp_path, [line(16.0, other=None), line(None, trial=1)])
    assert rows[0].no_control == f"{why} worked"
    rows = board(tmp_path, lines([16.0, 16.0]))
    assert rows[0].no_control is None and "no control: one" not in told(tmp_path, rows)


def test_the_best_of_many_attacks_has_to_be_better(tmp_path: Path) -> None:
    """Rule 13: its interval allows for the choice, in the verdict and beside the bar."""
    (alone,) = board(tmp_path, LUCKY)
    assert alone.gain is not None and alone.gain.certain > 3.0
    gain = judged(board(tmp_path, [*LUCKY, *WEAK])).gain
    assert gain is not None and gain.compared == 8
    low, high = student_interval([3.2, 4.0, 4.6, 3.4, 4.3], confidence=1 - 0.05 / 8)
    assert (gain.low, gain.high) == pytest.approx((low, high))


def test_a_guess_of_few_public_images_is_called_poor(tmp_path: Path) -> None:
    """Rule 12: with their number, what it means and what to do; and of enough nothing is said."""

    def guessed(size: int, public: int) -> Lines:
        few = {"public": public, "public_per_image": public / size}
        rows = [row | {"batch_size": size} for row in lines([20.0, 21.0, 22.0])]
        return [row | {"baseline": row["baseline"] | few} for row in rows]

    rows = board(tmp_path, guessed(4, 1))
    for text in (
        told(tmp_path, rows),
        " ".join(json.loads(render(rows, "json"))["warnings"]),
        records(rows)[0]["warning"],
        " ".join(describe_cautions(judged(rows))),
    ):
        assert "learned from 1 public image, 0.25 for each image" in text
        assert "20 are needed" in text and "more test images" in text
    both = board(tmp_path, [*guessed(4, 1), *guessed(2, 1)])
    (warning,) = json.loads(render(both, "json"))["warnings"]
    assert warning.startswith("batch size 2, 4, at worst: ") and "0.25 for each" in warning
    assert "public images, " not in told(tmp_path, board(tmp_path, guessed(4, 80)))


def test_an_interval_is_of_as_many_networks_and_clients_as_were_attacked(tmp_path: Path) -> None:
    """Trials of one run share weights and partition; only other runs and clients vary them."""
    found = lines([20.0, 21.0, 22.0])
    (one,) = board(tmp_path, found)
    assert (one.networks, one.clients, one.n) == (1, 1, 3)
    (several,) = board(tmp_path, [row | {"client": row["trial"]} for row in found])
    assert (several.networks, several.clients) == (1, 3)
    folders = [save(tmp_path / str(number), [row]) for number, row in enumerate(found)]
    (runs,) = rows = leaderboard_rows(folders)
    assert (runs.networks, runs.clients, runs.n) == (3, 3, 3)
    assert len({one.population, several.population, runs.population}) == 3
    for each in (one, runs):
        assert each.population in " ".join(render([each], width=200).split())
    assert population_of([*rows, one]) not in (one.population, runs.population)


@pytest.mark.parametrize("copies", [(0, 1, 2), (0, 0, 0)])
def test_copies_of_victims_among_public_images_are_counted_and_told(
    copies: tuple[int, ...], tmp_path: Path
) -> None:
    """Rule 12: whoever has them may know a victim without any update, however many others."""
    found = lines([20.0, 21.0, 22.0])
    for row, count in zip(found, copies, strict=True):
        row["baseline"] |= {"public": 400, "public_per_image": 100.0, "near_copies": count}
    (row,) = board(tmp_path, found)
    assert row.near_copies == sum(copies)
    assert len(json.loads(render([row], "json"))["warnings"]) == (row.near_copies > 0)
    assert (row.guess_problem in row.warnings) == (row.near_copies > 0)


def test_a_masked_vector_is_told_from_an_update(tmp_path: Path) -> None:
    """Behind a secure sum the server's rows are of masked vectors; behind `aggregate` are none."""
    seen = [("server", "clipped"), ("server", "secure"), ("aggregate", "secure")]
    found = [line(12.0, defense=d, vantage=v) for v, d in [*seen, ("aggregate", "plain")]]
    rows = board(tmp_path, [line(20.0), *found])
    assert [(row.defense, row.vantage) for row in rows if row.masked] == [("secure", "server")]
    named = {row.attack_on for row in rows if row.defense == "secure"}
    assert named == {f"{rows[0].attack} (masked)", f"{rows[0].attack} (aggregate)"}
    text = render(rows, width=120)
    assert text.count(f"{rows[0].attack} masked") == 1
    assert "masked: on a client's part of a secure sum" in text


def test_rounds_without_an_update_are_told(tmp_path: Path) -> None:
    """The accuracy behind closed sums is that of the model at its start."""
    rounds = [
        {"defense": stack, "round": round, "participants": [0, 1], "aggregated": count}
        for stack, counts in (("none", (2, 2)), ("secure", (0, 2)))
        for round, count in enumerate(counts, start=1)
    ]
    (told,) = standing_still(load_runs([save(tmp_path, [line(20.0)], rounds)]))
    assert told.startswith("secure: the model stayed as it was in 1 of 2 rounds")
