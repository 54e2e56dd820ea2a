"""The three forms of the leaderboard, what they are read from, and certificates in them."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from answer_rows import save, trial
from synthetic_run import write_run

from fedsim.contracts.grant import Grant
from fedsim.report import LeaderboardRow, ReportError, leaderboard_rows, load_runs, render
from fedsim.report.content import Content
from fedsim.report.judge import judge
from fedsim.report.messages import _describe_certificates
from fedsim.report.page import html_of
from fedsim.results.record import read_lines, write_lines


@pytest.fixture(scope="session")
def rows(run_folder: Path) -> list[LeaderboardRow]:
    return leaderboard_rows([run_folder])


def test_a_line_per_defense_attack_and_batch_size(rows: list[LeaderboardRow]) -> None:
    assert len(rows) == 3 * 3 * 2
    assert {row.n for row in rows} == {3}
    strongest = [row for row in rows if row.strongest]
    assert [row.defense for row in strongest] == ["none", "pruning", "dp"]
    for best in strongest:
        assert best.strength == max(row.strength for row in rows if row.defense == best.defense)
    assert rows.index(strongest[0]) == 0


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120, 200])
def test_the_table_fits_the_terminal_and_keeps_what_matters(
    width: int, rows: list[LeaderboardRow]
) -> None:
    text = render(rows, width=width)
    assert "\x1b" not in text and "INVALID" not in text
    assert max(map(len, text.splitlines())) <= width
    heading = next(line for line in text.splitlines() if line.startswith("defense"))
    for name in ("found", "gain", "acc", "ε"):
        assert re.search(rf" {name}( |$)", heading), name
    (best,) = [line for line in text.splitlines() if line.startswith("dp ")]
    assert "▸" in best and "61%" in best and "7.82" in best and re.search(r"[+−]\d+\.\d", best)
    words = re.sub(r"\s+", " ", text)
    assert "dp 7.82 (1e-05, client, zero out)" in words, "no ε without its terms"
    assert rows[0].population in words, "no interval without its population"
    assert ("sec" in heading) is (width >= 100)


def test_names_cannot_drive_the_terminal(rows: list[LeaderboardRow]) -> None:
    text = render([replace(rows[0], defense="\x1b[2Jevil", attack="[red]x[/red]")])
    assert "\x1b" not in text
    assert "[red]x[/red]" in text


def test_what_varies_is_told_apart(rows: list[LeaderboardRow]) -> None:
    text = render([rows[0], replace(rows[0], round=2, knowledge=Grant(labels="known"))], width=120)
    assert "labels=known" in text
    assert "round=2" in text
    assert "vantage server" in text


def test_json_and_csv_hold_everything_and_no_infinity(rows: list[LeaderboardRow]) -> None:
    document = json.loads(render(rows, "json"), parse_constant=lambda name: pytest.fail(name))
    assert document["valid"] is True
    assert document["positive_controls"][0]["status"] == "passed"
    first = document["rows"][0]
    assert first["epsilon"] == "inf"
    assert first["metrics"]["psnr"]["mean"] == rows[0].metrics["psnr"].mean  # type: ignore[union-attr]
    assert first["metrics"]["lpips"] is None
    assert document["rows"][-1]["epsilon"] == pytest.approx(7.82)
    records = list(csv.DictReader(io.StringIO(render(rows, "csv"))))
    assert len(records) == len(rows) and records[0]["valid"] == "True"
    assert float(records[0]["psnr_mean"]) == first["metrics"]["psnr"]["mean"]
    assert (records[0]["lpips_mean"], records[0]["epsilon"]) == ("", "inf")


def test_without_rows_every_form_says_so() -> None:
    assert "no results" in render([])
    assert json.loads(render([], "json"))["valid"] is False
    assert "no results" in render([], "csv")


def test_sweeps_are_found_below_a_folder_and_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in ("train", "eval"):
        variant = {"training.local.mode": mode}
        write_run(tmp_path / f"mode={mode}", stacks=["none"], attacks={}, variant=variant)
    rows = leaderboard_rows([tmp_path])
    assert [row.variant for row in rows] == [
        "training.local.mode=eval",
        "training.local.mode=train",
    ]
    assert [row.folders for row in rows] == [
        (str(tmp_path / f"mode={mode}"),) for mode in ("eval", "train")
    ]
    monkeypatch.chdir(tmp_path)
    assert "\nin mode=eval\n" in render(rows), "a title leads to its folder"


def test_runs_of_other_settings_are_kept_apart_and_those_of_other_engines_pooled(
    run_folder: Path, tmp_path: Path
) -> None:
    """Their rows may agree in all that they state, and none must hide another's."""
    once = leaderboard_rows([run_folder])
    other = shutil.copytree(run_folder, tmp_path / "other")
    text = (other / "scenario.yaml").read_text(encoding="utf-8")
    (other / "scenario.yaml").write_text(text.replace("clients: 10", "clients: 2"))
    both = leaderboard_rows([run_folder, other])
    assert {row.variant for row in both} == {"data.clients=10", "data.clients=2"}
    assert [row.n for row in both] == 2 * [row.n for row in once]
    pooled = text.replace("seed: 7", "seed: 8") + "federation: {engine: simulation}\n"
    (other / "scenario.yaml").write_text(pooled)
    lines = [row | {"seed": 90 + row["seed"]} for row in read_lines(other / "results.jsonl")]
    write_lines(other / "results.jsonl", lines)
    both = leaderboard_rows([run_folder, other])
    assert [(row.variant, row.n) for row in both] == [(row.variant, 2 * row.n) for row in once]


def test_damaged_folders_are_refused_with_the_place(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no such folder"):
        leaderboard_rows([tmp_path / "absent"])
    with pytest.raises(ReportError, match=r"no results\.jsonl"):
        leaderboard_rows([tmp_path])
    path = tmp_path / "results.jsonl"
    lines = (run_folder / "results.jsonl").read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1].replace('"status": "ok"', '"status": "great"') + lines[2])
    with pytest.raises(ReportError, match="line 2: status"):
        leaderboard_rows([tmp_path])
    path.write_text(lines[0] + lines[1][:40])  # a run that was killed while it wrote
    assert leaderboard_rows([tmp_path])[0].n == 1
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(ReportError, match="not JSON"):
        leaderboard_rows([tmp_path])
    (tmp_path / "record.json").write_text("{}")
    (tmp_path / "scenario.yaml").write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(ReportError, match="not YAML"):
        leaderboard_rows([tmp_path])
    (tmp_path / "scenario.yaml").write_text(f"name: {'x' * 2_000_000}")
    with pytest.raises(ReportError, match=r"at most 1\.0 MiB"):
        leaderboard_rows([tmp_path])


def test_a_text_is_no_formula_for_a_spreadsheet(run_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    path = copy / "results.jsonl"
    for start in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1"):
        write_lines(path, [row | {"dataset": start} for row in read_lines(path)])
        text = render(leaderboard_rows([copy]), "csv")
        shown = list(csv.DictReader(io.StringIO(text, newline="")))
        assert {row["dataset"] for row in shown} == {"'" + start.replace("\r", " ")}
        numbers = [value for row in shown for value in row.values() if re.match(r"-\d", value)]
        assert numbers, "negative numbers stay numbers"


def certificate_sentence(rows: list[LeaderboardRow]) -> str:
    (verdict,) = judge(rows).verdicts
    return _describe_certificates(verdict.certificates)


EIGHT = {"images": 4, "determined": 4, "certified": 4, "false": 0, "per_image": {}}


def folder_of(root: Path, *told: dict[str, Any] | None) -> Path:
    """A run of a trial for each certificate, and of an attack that has none."""
    rows = [
        trial(30.0, trial=number, defense="none", attack="classifier_fit", feature_cosine=1.0)
        | {"certificate": certificate}
        for number, certificate in enumerate(told)
    ]
    old = [trial(25.0, trial=number, defense="none") for number in range(2)]
    return save(root, [*rows, *old])


@pytest.mark.parametrize(
    ("second", "figure", "sentence"),
    [
        (EIGHT, "8/8", "certified 8 of 8 images (features) by classifier_fit, batch size 1: the "
         "attacker knows that these are right"),
        (EIGHT | {"false": 1}, "8/8", "false certificates among them: 1"),
        (EIGHT | {"certified": 1}, "5/8", "certified 5 of 8 images"),
        (None, "4/4", "certified 4 of 4 images"),
    ],
)  # fmt: skip
def test_certificates_are_in_table_page_and_words(
    second: dict[str, Any] | None, figure: str, sentence: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "run", EIGHT, second)
    rows = leaderboard_rows([folder])
    assert sentence in certificate_sentence(rows)
    wrong = bool(second and second["false"])
    assert f"{figure} !1" in render(rows, width=240) if wrong else figure in render(rows, width=240)
    page = html_of(Content(load_runs([folder]))).replace("\N{NO-BREAK SPACE}", " ")
    words = f"{figure.replace('/', ' of ')} images" + ", 1 of them false" * wrong
    assert page.count(f"<dt>certified</dt><dd>{words}</dd>") == 1


def test_json_and_csv_have_the_sums_of_certificates(tmp_path: Path) -> None:
    rows = leaderboard_rows([folder_of(tmp_path / "run", EIGHT, EIGHT | {"determined": None})])
    document = json.loads(render(rows, "json"))
    assert [row["certificates"] for row in document["rows"]] == [
        {"images": 8, "determined": 4, "certified": 8, "false": 0},
        None,
    ]
    first, second = csv.DictReader(io.StringIO(render(rows, "csv")))
    assert first["certificates_certified"] == "8" and second["certificates_certified"] == ""


def test_none_certified_is_said_and_none_offered_is_not(tmp_path: Path) -> None:
    nothing = EIGHT | {"certified": 0}
    words = certificate_sentence(leaderboard_rows([folder_of(tmp_path / "a", nothing)]))
    assert "does not know which are right" in words
    silent = EIGHT | {"certified": None, "false": None}
    assert certificate_sentence(leaderboard_rows([folder_of(tmp_path / "b", silent)])) == ""


def test_features_are_named_before_labels_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", EIGHT | {"certified": 3})
    labels = trial(30.0, defense="none", attack="label_inference", label_accuracy=1.0)
    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(labels | {"certificate": EIGHT | {"determined": None}}) + "\n")
    words = certificate_sentence(leaderboard_rows([folder]))
    assert "certified 3 of 4 images (features) by classifier_fit" in words
