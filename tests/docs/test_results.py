"""The pages of results are what their script makes of the CSV files, and nobody typed a figure."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from doc_pages import ROOT, links, read

from fedsim.results.lines import ResultRow
from fedsim.scoring.statistics import student_interval

sys.path.insert(0, str(ROOT / "docs/site"))
sys.path.insert(0, str(ROOT / "docs/results"))
import make_csv
import results

FOLDER = ROOT / "docs" / "results"


@pytest.mark.parametrize("page", results.TEMPLATES)
def test_a_page_is_what_the_script_makes_of_the_files(page: str) -> None:
    assert read(page) == results.render(page), "run: python docs/site/results.py"


@pytest.mark.parametrize("template", results.TEMPLATES.values())
def test_no_figure_is_typed(template: str) -> None:
    """A figure in decibels, per cent or with an interval comes from a file."""
    text = (ROOT / "docs/site" / template).read_text(encoding="utf-8")
    typed = re.sub(r"\{[{%].*?[%}]\}", "", text, flags=re.DOTALL)
    figures = re.findall(r"[\d.]+ dB|\d\.\d+ \[|\d times (?:of|faster)|\d\.\d+ above", typed)
    assert not figures


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.csv")))
def test_the_appendix_leads_to_each_file(name: str) -> None:
    assert f"results/{name}.csv" in links(read("docs/results-appendix.md"))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the CSV files."""
    return Path(shutil.copytree(FOLDER, tmp_path / "results"))


def test_another_figure_in_a_file_is_another_page(copied: Path) -> None:
    file = copied / "speed.csv"
    file.write_text(file.read_text(encoding="utf-8").replace("3.31", "3.21"), encoding="utf-8")
    assert results.render("docs/results.md", copied) != read("docs/results.md")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param("audit", "True,5.6064", "False,5.6064", id="a claim that an audit refutes"),
        pytest.param("secure-sums", "-2.4,-0.7", "2.4,3.7", id="masked vectors that leak"),
        pytest.param("quickstart", "2.2159,", "-2.2159,", id="a quickstart without a leak"),
    ],
)
def test_a_sentence_that_is_no_longer_true_is_refused(
    copied: Path, name: str, before: str, after: str
) -> None:
    file = copied / f"{name}.csv"
    text = file.read_text(encoding="utf-8")
    assert before in text
    file.write_text(text.replace(before, after), encoding="utf-8")
    with pytest.raises(results.ClaimError):
        results.render("docs/results.md", copied)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.csv")), ids=lambda path: path.stem)
def test_no_file_is_of_a_run_that_has_not_ended(path: Path) -> None:
    assert "the run has not ended" not in path.read_text(encoding="utf-8")


def test_pairs_are_of_the_same_batches() -> None:
    first = [
        {"seed": "1", "batch_size": "8", "client": "0", "trial": str(trial), "psnr": str(psnr)}
        for trial, psnr in enumerate((15.0, 17.0, 16.0))
    ]
    other = [
        {**row, "psnr": str(float(row["psnr"]) - gain)}
        for row, gain in zip(first, (1, 2, 3), strict=True)
    ]
    assert results.mean_of_pairs(first, other, "psnr")["psnr_mean"] == "2.0"
    with pytest.raises(results.ClaimError, match="same batches"):
        results.mean_of_pairs(first, other[::-1], "psnr")


def test_pairs_that_share_an_image_count_as_one() -> None:
    other = [
        {"seed": "1", "batch_size": "1", "client": "0", "trial": str(t), "group": g, "psnr": "10"}
        for t, g in enumerate("aabc")
    ]
    first = [
        row | {"psnr": psnr} for row, psnr in zip(other, ("11", "13", "14", "15"), strict=True)
    ]
    found = results.mean_of_pairs(first, other, "psnr")
    ends = student_interval([2.0, 4.0, 5.0])
    assert (float(found["psnr_low"]), float(found["psnr_high"])) == pytest.approx(ends)


def test_trials_that_share_an_image_are_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are of two runs, or of two attacks."""
    blank = {
        "scenario": "s", "dataset": "faces", "model": {"name": "lenet", "parameters": {}},
        "learner": "sgd", "training": {}, "defense": {"name": "none", "stack": []},
        "vantage": "server", "knowledge": {"labels": "inferred", "bn": "none"}, "round": 1,
        "client": 0, "seed": 0, "observation": "o", "status": "ok", "metrics": {"psnr": 1.0},
        "baseline": {"name": "mean_image", "psnr": 1.0}, "privacy": {"epsilon": "inf"},
    }  # fmt: skip
    rows = [
        ResultRow.model_validate(
            blank
            | {"attack": {"name": name, "label": name, "restarts": 1, "parameters": {}}}
            | {"batch_size": len(victims), "trial": trial, "victims": list(victims)}
        )
        for name in ("one", "two")
        for trial, victims in enumerate(("ab", "cd", "bxyz"))
    ]
    runs = [SimpleNamespace(ended=True, rows=part, setting=str) for part in (rows[:2], rows[2:])]
    monkeypatch.setattr(make_csv, "load_runs", lambda folders: runs)
    found = {(row["attack"], row["trial"]): row["group"] for row in make_csv.by_trial([])}
    assert found["one", "0"] == found["one", "2"] == found["two", "2"]
    assert found["one", "1"] == found["two", "1"] != found["one", "0"]
