"""A run that has not ended says once on each page how far it is, and no page speaks of its end."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_scenario
from typer.testing import CliRunner

import fedsim
from fedsim import stages
from fedsim.cli.commands import app
from fedsim.contracts import plugins
from fedsim.report import load_runs, unfinished, write_report
from fedsim.report.dossier import _list_untried, dossier_of
from fedsim.results.record import PLAN, Plan
from fedsim.system.lock import is_locked, lock_folder
from fedsim.types import FedsimError, RunFailed

FAR = "20 of 54 attack runs (7 of 18 lines of the leaderboard begun) and 9 of 9 rounds of training"
GOES_ON = "nothing is at work in it: continue it with --resume"
PLANNED: dict[str, Any] = {
    "scenario": "photos-demo",
    "variant": {},
    "rounds": 9,
    "attack_runs": 54,
    "lines": 18,
    "resumable": True,
}


def planned(folder: Path, **other: Any) -> None:
    Plan(**{**PLANNED, **other}).save(folder)


@pytest.fixture
def half(run_folder: Path, tmp_path: Path) -> Path:
    """A run that was killed in its attacks on the second defense, as it is left behind."""
    folder = shutil.copytree(run_folder, tmp_path / "half")
    (folder / "record.json").unlink()
    lines = (folder / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:20]]
    for row in rows:
        row["control"] = {"other_update": None}  # scored at the end
    text = "".join(json.dumps(row) + "\n" for row in rows) + lines[20][:100]
    (folder / "results.jsonl").write_text(text)
    with (folder / "scenario.yaml").open("a") as file:
        file.write("attacks: [{name: inverting_gradients}, {name: idlg}]\n")
    planned(folder)
    return folder


def words_of(html: str) -> str:
    text = re.sub(r"<style.*?</style>|<title>.*?</title>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text))


def invoked(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_every_page_says_once_and_alike_how_far_the_run_is(half: Path) -> None:
    (line,) = unfinished(load_runs([half]))
    assert line == f"UNFINISHED: the run {half} has {FAR}, and {GOES_ON}"
    report = write_report(half).read_text(encoding="utf-8")
    dossier = words_of(dossier_of(load_runs([half]), half))
    assert words_of(report).count(FAR) == dossier.count(FAR) == 1
    assert report.count("<strong>UNFINISHED</strong>") == 1 and "<title>UNFINISHED" in report
    for page in (words_of(report), dossier):
        assert "20 attack runs so far" in page and GOES_ON in page
    table = invoked("leaderboard", str(half))
    assert table.stderr.count(line) == 1 and "UNFINISHED  photos-demo" in table.stdout
    assert invoked("report", str(half)).stderr.strip() == line
    checked = invoked("check", str(half), "--max-gain", "3").stdout
    assert checked.startswith(f"{line}\n") and "what is not measured" not in checked


def test_nothing_is_said_of_its_end(half: Path) -> None:
    """No conclusion, no false reason for a missing control, nothing not tried that is to come."""
    document = json.loads(invoked("leaderboard", str(half), "--format", "json").stdout)
    assert not document["valid"] and not any(row["valid"] for row in document["rows"])
    assert len(document["rows"]) == 7
    assert document["unfinished"] == unfinished(load_runs([half]))
    assert not any("no control" in line for line in document["warnings"])
    uncompared = "not yet compared with another update"
    assert {row["no_control"] for row in document["rows"]} == {uncompared}
    page = words_of(write_report(half).read_text(encoding="utf-8"))
    assert "Not shown" in page and "Not judged" not in page and "INVALID" not in page
    assert not any(row["strongest"] for row in document["rows"])
    assert "▸ " not in invoked("leaderboard", str(half)).stdout.partition("▸: ")[0]
    assert "Not tried here" not in page and "observe.trials" not in page
    assert "Positive control passed so far" in page and uncompared in page
    dossier = words_of(dossier_of(load_runs([half]), half))
    assert "The attacks so far work without a defense" in dossier and uncompared in dossier
    assert "no control" not in page + dossier
    runs = load_runs([half])
    reasons = {name: reason for name, _, reason in _list_untried(runs[0].rows, runs)}
    assert reasons["idlg"] == "the run has not come to it"
    assert "does not name it" in reasons["prior_only"]
    assert set(reasons) < {plugin.name for plugin in plugins.list_installed("fedsim.attacks")}


def test_a_control_that_is_still_to_come_is_not_called_missing(half: Path) -> None:
    path = half / "results.jsonl"
    rows = [line for line in path.read_text().splitlines() if '"stack": []' not in line]
    path.write_text("\n".join(rows))
    assert "UNFINISHED" in invoked("leaderboard", str(half)).stdout
    for text in (invoked("leaderboard", str(half)).stdout, write_report(half).read_text()):
        assert "INVALID" not in text and "add `none: []`" not in text


@pytest.mark.parametrize(
    ("key", "value"), [("rounds", -1), ("attack_runs", 1.5), ("lines", True), ("lines", 10**400)]
)
def test_a_plan_that_plans_nothing_is_refused(key: str, value: object, tmp_path: Path) -> None:
    (tmp_path / PLAN).write_text(json.dumps({**PLANNED, key: value}))
    with pytest.raises(FedsimError, match=f"{PLAN}.*{key}"):
        load_runs([tmp_path])


def test_a_run_at_work_is_not_to_be_continued(half: Path) -> None:
    with lock_folder(half):
        (line,) = unfinished(load_runs([half]))
        assert is_locked(half) and line.endswith(f"{FAR}, and is still going")
    (half / ".lock").write_text("process 1 on a machine\n")  # as a kill leaves it
    assert not is_locked(half)
    assert unfinished(load_runs([half]))[0].endswith(GOES_ON)


def test_an_assessment_that_was_killed_is_unfinished_too(half: Path) -> None:
    (half / "scenario.yaml").unlink()
    planned(half, resumable=False, rounds=0)
    (line,) = unfinished(load_runs([half]))
    assert line.endswith("and cannot be continued: repeat it with another --out")


def test_a_record_does_not_make_up_for_rows_that_are_not_there(
    run_folder: Path, half: Path
) -> None:
    """As after `fedsim collect` was killed, or a variant that is resumed."""
    shutil.copy(run_folder / "record.json", half)
    assert FAR in unfinished(load_runs([half]))[0]
    shutil.copy(run_folder / "results.jsonl", half)
    assert not unfinished(load_runs([half]))


def test_a_run_without_a_row_yet_is_no_invalid_one(half: Path) -> None:
    (half / "results.jsonl").unlink()
    far = "0 of 54 attack runs (0 of 18 lines of the leaderboard begun)"
    page = write_report(half).read_text(encoding="utf-8")
    assert words_of(page).count(far) == 1 and "INVALID" not in page and "UNSCORED" not in page
    assert "<title>UNFINISHED: " in page
    table = invoked("leaderboard", str(half))
    assert table.stdout == "UNFINISHED: no attack is scored yet\n" and far in table.stderr
    document = json.loads(invoked("leaderboard", str(half), "--format", "json").stdout)
    assert not document["valid"] and far in document["invalid_reasons"][0]
    damaged = half / PLAN
    damaged.write_text("{}")
    assert "remove it" in invoked("leaderboard", str(half)).output


SWEPT = tiny_scenario(
    seed=3,
    training={"rounds": 2, "local": {"batch_size": 2}},
    defenses={"none": [], "pruning": [{"name": "gradient_pruning", "ratio": 0.9}]},
    attacks=["label_inference"],
    observe={"rounds": [1], "batch_sizes": [1], "trials": 2},
    sweep={"training.local.lr": [0.1, 0.2]},
)


@pytest.mark.usefixtures("attacks_here")
def test_variants_that_are_still_to_come_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RunFailed("no attack works today")

    with monkeypatch.context() as patch:
        patch.setattr(stages, "run_jobs", broken)
        with pytest.raises(RunFailed):
            fedsim.run(SWEPT, out=tmp_path / "out", workers=1)
    first, second = unfinished(load_runs([tmp_path / "out"]))
    none = "0 of 4 attack runs (0 of 2 lines of the leaderboard begun)"
    assert f"{none} and 4 of 4 rounds" in first and f"{none} and 0 of 4 rounds" in second
    fedsim.run(SWEPT, out=tmp_path / "out", workers=1, resume=True)
    runs = load_runs([tmp_path / "out"])
    assert not unfinished(runs)
    assert [(run.attack_runs, len(run.lines)) for run in runs] == [(4, 2), (4, 2)]
