"""Rows of several threat models: no ranking, headline or answer mixes them."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from answer_rows import WORKS, judged, trials

from fedsim.cli import shared
from fedsim.report import leaderboard_rows, load_runs, render, write_report
from fedsim.report.content import Content
from fedsim.report.dossier import write_dossier
from fedsim.report.judge import Verdict
from fedsim.report.limits import broken_limits
from fedsim.report.messages import brief
from fedsim.report.threat import HONEST, describe_attacker, threat_model
from fedsim.results.reading import measurements

WEAK, STRONG = [12.1, 11.9, 12.0], [38.0, 39.0, 40.0]

GRANTS: list[dict[str, Any]] = [
    {"knowledge": {"labels": "known"}},
    {"knowledge": {"public": "test"}},
    {"knowledge": {"side_channel": "power"}},
    {"server": "planted"},
    {"server": "modified"},
    {"brought": ["weights=prior.pt"]},
]
"""What sets a strong attack apart; the side channel is a grant that this version does not know."""


def granted(case: dict[str, Any], **others: Any) -> list[dict[str, Any]]:
    """A strong attack on `dp` and on no defense, in another threat model."""
    rows = trials(STRONG, attack="strong", ssim=0.9, **others)
    rows += trials(STRONG, attack="strong", ssim=0.9, **{**others, "defense": "none"})
    for row in rows:
        if "brought" in case:
            row["attack"] = {**row["attack"], "brought": case["brought"]}
        else:
            row |= case
    return rows


@pytest.fixture(params=GRANTS, ids=str)
def mixed_update(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run folder: the strong rows of another threat model first, then an honest server's."""
    judged(tmp_path / "run", [*granted(request.param), *WORKS, *trials(WEAK)])
    return tmp_path / "run"


def test_no_ranking_mixes_them_and_the_honest_server_is_first(mixed_update: Path) -> None:
    rows = leaderboard_rows([mixed_update])
    assert len({row.comparison for row in rows}) == 2
    honest = [row for row in rows if row.threat == HONEST]
    assert rows[: len(honest)] == honest
    assert {row.attack for row in honest} == {"inverting_gradients"}
    assert {row.attack for row in rows if row not in honest} == {"strong"}
    records = list(csv.DictReader(io.StringIO(render(rows, "csv"))))
    assert records[0]["threat_model"] == "honest server"
    assert records[-1]["threat_model"] == rows[-1].threat.title != "honest server"
    document = json.loads(render(rows, "json"))
    assert [row["threat_model"] for row in document["rows"]] == [row.threat.title for row in rows]
    controls = [control["comparison"] for control in document["positive_controls"]]
    assert [where[-2] for where in controls] == ["honest server", rows[-1].threat.title]


def attacker_of(verdict: Verdict) -> str:
    row = verdict.strongest
    return describe_attacker(row.threat, row.vantage, masked=row.masked)


def test_headlines_are_of_one_threat_model_each(mixed_update: Path) -> None:
    honest, other = Content(load_runs([mixed_update])).judgements
    assert honest.comparison[-2] == HONEST != other.comparison[-2]
    found = [{v.defense: v.finding for v in each.verdicts}["dp"] for each in (honest, other)]
    assert found == ["nothing", "recognizable"]
    named = [attacker_of(each.verdicts[0]) for each in (honest, other)]
    assert named[0] == "the server" != named[1]


def test_terminal_report_and_page_show_them_apart(mixed_update: Path) -> None:
    rows = leaderboard_rows([mixed_update])
    title = rows[-1].threat.differs or "by a malicious server"
    table = render(rows, width=160)
    assert "s, faces, lenet, honest server" in table
    runs = load_runs([mixed_update])
    assert "s, faces, lenet, honest server" in shared.leaderboard(runs, "table")
    assert title in table and table.index("inverting_gradients") < table.index(title)
    for page in (write_report(mixed_update), write_dossier(mixed_update)[0]):
        text = page.read_text()
        assert title in text and "s, faces, lenet, honest server" in text
    for section in Content(runs).sections:
        assert len({line.row.threat for line in section.lines}) == 1
        assert len({line.row.attack for line in section.lines}) == 1


def test_limits_name_the_threat_model(mixed_update: Path) -> None:
    title = leaderboard_rows([mixed_update])[-1].threat.title
    lines = broken_limits([mixed_update], max_gain=3.0)
    assert lines and all(title in line for line in lines if "strong" in line)
    assert not any("inverting_gradients" in line and "above 3" in line for line in lines)


@pytest.mark.parametrize("case", GRANTS, ids=str)
def test_whoever_looks_what_else_was_had_is_said(case: dict[str, Any], tmp_path: Path) -> None:
    """In the headline, in what an attacker knows, and in a dossier beside each figure."""
    entry = {
        "labels": "true labels",
        "public": "test split",
        "side_channel": "side_channel=power",
        "planted": "planted",
        "modified": "module",
        "weights=prior.pt": "own weights=prior.pt",
    }
    found = judged(tmp_path / "run", granted(case, vantage="client")).verdicts
    row = leaderboard_rows([tmp_path / "run"])[0]
    for verdict in found:
        assert attacker_of(verdict).startswith("another participant")
        done = {"planted": "server planted weights", "modified": "server put a module"}
        assert (row.threat.differs or done[case["server"]]) in brief(verdict)
    said = " ".join(text for _, text in threat_model(measurements(load_runs([tmp_path / "run"]))))
    key = next(iter(case.get("knowledge", {})), None) or case.get("server") or case["brought"][0]
    assert entry[key] in said
    assert ("It follows the protocol." in said) is ("server" not in case)
    text = write_dossier(tmp_path / "run")[0].read_text()
    sight = [*row.threat.beyond, "client"] if row.threat.beyond else [row.server, "client"]
    assert f"strong <small>{', '.join(sight)}</small>" in text


def test_a_trial_without_a_score_hides_no_leak_of_another(tmp_path: Path) -> None:
    leaks, nothing = trials([40.0, 12.0], attack="strong")
    nothing["metrics"] = {"psnr": None}
    judged(tmp_path / "run", [*WORKS, *trials(WEAK), leaks, nothing])
    (line,) = broken_limits([tmp_path / "run"], max_psnr=20.0)
    assert line.startswith("dp, strong") and "40.0 dB, above 20" in line


def test_a_dossier_mixes_no_threat_models_unsaid(tmp_path: Path) -> None:
    granted_rows = granted({"knowledge": {"side_channel": "power"}})
    rows = copy.deepcopy([*WORKS, *trials(WEAK), *granted_rows])
    for row in rows:
        row["metrics"]["membership_auc"] = 0.9 if row["attack"]["name"] == "strong" else 0.5
    judged(tmp_path / "run", rows)
    text = write_dossier(tmp_path / "run")[0].read_text()
    assert "AUC 0.50 to 0.90 (a coin: 0.50), over 2 threat models" in text
    assert "does not know (side_channel=power)" in text
    assert "what no honest server has by itself (side_channel=power)" in text
