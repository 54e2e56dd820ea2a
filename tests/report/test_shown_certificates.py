"""What an attacker knows of its own answer, from a row to whoever reads a report."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from answer_rows import save, trial

from fedsim.report import leaderboard_rows, load_runs, render
from fedsim.report.content import Content
from fedsim.report.judge import judge
from fedsim.report.messages import _describe_certificates
from fedsim.report.page import html_of
from fedsim.report.row import LeaderboardRow


def certificate_sentence(rows: list[LeaderboardRow]) -> str:
    """What is said of certificates of the only defense."""
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
    assert all("certificate" not in row for row in old)
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
def test_it_is_in_table_page_and_words(
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


def test_json_and_csv_have_the_sums(tmp_path: Path) -> None:
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
