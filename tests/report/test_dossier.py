"""The dossier: inert, repeatable, and claiming no more than it may."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from answer_rows import PROVEN, trial
from synthetic_run import write_run
from test_page import Page
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.contracts import plugins
from fedsim.report.content import Content
from fedsim.report.dossier import (
    _check_command,
    _coverage,
    _criteria,
    _hashes,
    _list_commands,
    _list_tried,
    _list_untried,
    dossier_of,
    write_dossier,
)
from fedsim.results.lines import ResultRow
from fedsim.results.reading import load_runs
from fedsim.results.record import read_lines, write_lines
from fedsim.types import FedsimError


def page_of(folder: Path) -> Page:
    return Page(dossier_of(load_runs([folder]), folder))


def chapter(page: Page, number: int) -> str:
    start = page.html.index(f'id="chapter-{number}"')
    end = page.html.find(f'id="chapter-{number + 1}"')
    words = re.sub(r"<[^>]+>", " ", page.html[start:end])
    return re.sub(r"\s+", " ", html.unescape(words))


@pytest.fixture(scope="session")
def page(run_folder: Path) -> Page:
    return page_of(run_folder)


def titles(page: Page) -> list[str]:
    return re.findall(r'<h2 id="chapter-\d+">\d+\. ([^<]+)</h2>', page.html)


def test_chapters_that_are_pointed_to_are_the_right_ones(page: Page) -> None:
    meant = {3: "system", 5: "tried", 6: "Results", 7: "Guarantees", 9: "Limits", 10: "repeat"}
    assert len(titles(page)) == 11 and page.open == []
    named = {int(n) for n in re.findall(r"chapters? (\d+)", page.flat)}
    named |= {int(n) for n in re.findall(r"chapters \d+ and (\d+)", page.flat)}
    assert named == set(meant)
    for number, word in meant.items():
        assert word in titles(page)[number - 1]


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(
    run_folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / run_folder.name
    shutil.copytree(run_folder, copy)
    first = [path.read_bytes() for path in write_dossier(run_folder, tmp_path / "one")]
    assert [path.read_bytes() for path in write_dossier(copy)] == first
    for folder in (run_folder, copy):  # messages of a run that has not ended name its folder
        half = tmp_path / folder.parent.name / "half"
        shutil.copytree(folder, half)
        (half / "record.json").unlink()
    pages = [page_of(path).html for path in sorted(tmp_path.glob("*/half"))]
    assert len(set(pages)) == 1 and "UNFINISHED" in pages[0]


def test_what_is_invalid_stands_apart_and_answers_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "bad", scenario="bad", undefended=0.05, trials=3)
    alone = page_of(tmp_path / "runs")
    assert "INVALID" in chapter(alone, 2) and "It costs" not in chapter(alone, 2)
    assert "nothing follows" in chapter(alone, 6) and "Left the client" not in chapter(alone, 6)
    write_run(tmp_path / "runs" / "good", scenario="good", trials=3)
    both = page_of(tmp_path / "runs")
    valid, invalid = chapter(both, 6).split("INVALID: nothing follows")
    assert "good, photos" in valid and "bad, photos" not in valid.partition("bad, photos")[0]
    assert "Undefended" in invalid
    assert chapter(both, 2).count("It costs") == 2


def row(**changes: Any) -> ResultRow:
    return ResultRow.model_validate(trial(12.0, defense="none", attack="deep_leakage") | changes)


GENERATOR = {"name": "generative_prior", "label": "g", "brought": ["public=photos"]}
FACTORED = {"name": "factored_inversion", "label": "f", "parameters": {"public": True}}
"""It would use public images, and was granted none."""


@pytest.mark.parametrize(
    ("rows", "measured", "within"),
    [
        ([row()], "C", "AB"),
        ([row(knowledge={"public": "test"})], "D", "ABC"),
        ([row(attack=GENERATOR)], "D", "ABC"),
        ([row(attack=FACTORED)], "C", "AB"),
        ([row(knowledge={"bn": "running"})], "C", "AB"),
        ([row(knowledge={"bn": "inferred"})], "E", "ABCD"),
        ([row(knowledge={"bn": "exact", "public": "test"})], "E", "ABCD"),
        ([row(server="planted")], "F", "ABC"),
        ([row(server="modified", knowledge={"public": "test"})], "G", "ABCDF"),
        ([row(), row(server="modified")], "CF", "AB"),
        ([row(model=None, release={"kind": "sketch"})], "", ""),
        ([], "", ""),
    ],
)
def test_threat_models_that_a_run_covers(rows: list[ResultRow], measured: str, within: str) -> None:
    found = _coverage(rows)
    assert "".join(each.letter for each in found) == "ABCDEFGH"
    for word, letters in (("measured", measured), ("within", within)):
        assert "".join(e.letter for e in found if e.extent == word) == letters
    assert all(each.reason for each in found)
    assert found[-1].extent == "not measured", "no run lets an attacker choose clients"


def test_every_installed_attack_is_tried_or_not_with_a_reason() -> None:
    rows = [row(), row(attack={"name": "idlg", "label": "second"}, status="failed")]
    names = {plugin.name for plugin in plugins.list_installed("fedsim.attacks")}
    left = {name: reason for name, _, reason in _list_untried(rows)}
    assert set(left) == names - {"deep_leakage", "idlg"}
    tried = [(label, ok, n) for label, _, ok, n in _list_tried(rows)]
    assert tried == [("deep_leakage", 1, 1), ("second", 0, 1)]
    assert "clients send updates of a model" in left["membership_inference"]
    assert "knowledge.public: test" in left["feature_regression"]
    assert left["head_fit"].startswith("the scenario does not name it")
    granted = {name: why for name, _, why in _list_untried([row(knowledge={"public": "test"})])}
    assert granted["feature_regression"].startswith("the scenario does not name it")


def test_guarantees_state_unit_neighbours_delta_and_what_an_audit_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rounds = read_lines(folder / "rounds.jsonl")
    for each in rounds:
        if each["defense"] == "dp":
            each["epsilon"], each["privacy"] = 2.0, PROVEN
    write_lines(folder / "rounds.jsonl", rounds)
    assert "No claim was audited" in chapter(page_of(folder), 7)
    line = {"defense": "dp", "method": "one_run", "audited_epsilon": 2.5, "holds": False}
    (folder / "audit.jsonl").write_text(json.dumps(line) + "\n")
    stated = chapter(page_of(folder), 7)
    assert "2 (1e-05, client, zero out)" in stated
    assert "Audits (one run)" in stated
    red = '<td class="bad">at least 2.5: refutes the claim</td>'
    assert red in page_of(folder).html


def test_criteria_that_were_not_measured_say_so(run_folder: Path) -> None:
    measured = _criteria(Content(load_runs([run_folder])))
    assert measured["membership"] == "Not measured in this run."
    assert "images" in measured["reconstruction"]
    assert measured["means"].startswith("3 attacks")


def test_hashes_and_commands_are_those_that_repeat_the_run(small: Path) -> None:
    (run,) = load_runs([small])
    ((title, line),) = _list_commands([run], small)
    assert line == "fedsim run small/scenario.yaml --out again"
    assert title in chapter(page_of(small), 10) and line in chapter(page_of(small), 10)
    facts = dict(_hashes(run))
    assert all(digest in chapter(page_of(small), 10) for digest in facts.values())
    command = _check_command(small.name)
    told = subprocess.run(
        ["bash", "-c", command], cwd=small.parent, capture_output=True, text=True, check=True
    )
    name = next(name for name in facts if name.startswith("observations/"))
    assert told.stdout.split()[0] == facts[name]
    shown = subprocess.run(
        ["sha256sum", "scenario.yaml"], cwd=small, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[0] == facts["scenario.yaml"]


def test_the_command_writes_the_page_and_refuses_what_is_no_run(
    small: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["dossier", str(small), "--out", str(tmp_path / "there")])
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(tmp_path / "there" / "dossier.html")]
    (tmp_path / "empty").mkdir()
    refused = CliRunner().invoke(app, ["dossier", str(tmp_path / "empty")])
    assert refused.exit_code == 2 and "results.jsonl" in refused.output
    assert not list((tmp_path / "empty").iterdir())


def test_the_page_is_printed_by_an_installed_browser(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in says which page it was given; without any browser nothing is written."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FedsimError, match="--pdf"):
        write_dossier(small, tmp_path / "none", pdf=True)
    assert not (tmp_path / "none").exists()
    browser = tmp_path / "chromium"
    browser.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "to = next(a for a in sys.argv if a.startswith('--print-to-pdf='))\n"
        "open(to.partition('=')[2], 'w').write('%PDF ' + sys.argv[-1])\n"
    )
    browser.chmod(0o755)
    page, printed = write_dossier(small, tmp_path / "there", pdf=True)
    assert printed.read_text() == f"%PDF {page.as_uri()}"
    browser.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no display')\n")
    with pytest.raises(FedsimError, match="no display"):
        write_dossier(small, tmp_path / "failed", pdf=True)


def test_the_dossier_of_the_docs_has_the_chapters_of_today(page: Page) -> None:
    path = Path(__file__).parents[2] / "docs" / "dossier" / "quickstart.html"
    shown = Page(path.read_text(encoding="utf-8"))
    for number, title in enumerate(titles(page), start=1):
        assert f"{number}. {title}" in shown.flat, f"{path} is old: write it again"
