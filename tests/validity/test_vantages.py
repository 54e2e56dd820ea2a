"""Rows, tables and pages say who looked, and rank nobody's view with another's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_scenario
from typer.testing import CliRunner

import fedsim
from fedsim.cli.commands import app
from fedsim.report import leaderboard_rows, render
from fedsim.results.record import Row, Run
from fedsim.types import FedsimError

pytestmark = pytest.mark.usefixtures("attacks_here")

VANTAGES = ["server", "client", "eavesdropper"]
SCENARIO = tiny_scenario(
    seed=5,
    model={"name": "mlp", "hidden": [16], "activation": "sigmoid"},
    training={"rounds": 2, "local": {"batch_size": 1}},
    attacks=["label_inference", {"name": "idlg", "iterations": 20}],
    observe={"rounds": [1], "clients": "all", "vantages": VANTAGES},
    federation={"tls": False},
)


def changed(**sections: Any) -> dict[str, Any]:
    return {
        **SCENARIO,
        **{
            name: {**SCENARIO.get(name, {}), **new} if isinstance(new, dict) else new
            for name, new in sections.items()
        },
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fedsim.run(SCENARIO, out=tmp_path_factory.mktemp("run") / "out", workers=1)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    wanted = changed(federation={"tls": True})
    return fedsim.run(wanted, out=tmp_path_factory.mktemp("tls") / "out", workers=1)


def seen_from(run: Run, vantage: str) -> list[Row]:
    return [row for row in run.rows() if row["vantage"] == vantage]


def test_every_vantage_is_attacked(finished: Run) -> None:
    cells = [(row["attack"]["label"], row["vantage"], row["client"]) for row in finished.rows()]
    assert cells == [
        (attack, vantage, client)
        for attack in ("label_inference", "idlg")
        for vantage in VANTAGES
        for client in (0, 1)
    ]
    assert {row["status"] for row in finished.rows()} == {"ok"}


def test_in_plaintext_the_wire_gives_an_attack_what_the_server_has(finished: Run) -> None:
    told = {"vantage", "observation", "cost"}
    server, wire = (
        [{k: v for k, v in row.items() if k not in told} for row in seen_from(finished, vantage)]
        for vantage in ("server", "eavesdropper")
    )
    assert server == wire


def test_a_participant_is_after_the_others_images(finished: Run) -> None:
    victims = {row["client"]: row["victims"] for row in seen_from(finished, "server")}
    for row in seen_from(finished, "client"):
        assert row["victims"] == victims[1 - row["client"]]
        assert row["observation"].endswith(f"participant-000{row['client']}-training")
        if row["attack"]["label"] == "label_inference":
            assert row["metrics"]["label_accuracy"] == 1


def test_vantages_are_ranked_apart(finished: Run) -> None:
    rows = leaderboard_rows([finished.out])
    assert Counter(row.comparison[-1] for row in rows) == dict.fromkeys(VANTAGES, 2)
    assert [row.comparison[-1] for row in rows][:2] == ["server", "server"]
    assert len({row.cell for row in rows}) == 6
    for vantage in VANTAGES:
        assert sum(row.strongest for row in rows if row.vantage == vantage) <= 1
    text = render(rows, "table", width=200)
    page = finished.report.read_text(encoding="utf-8")
    for words in ("participant", "eavesdropper"):
        assert words in text and words in page
    assert "takes its own update off" in page and "in plaintext" in page


def test_what_the_server_saw_does_not_depend_on_who_else_looks(
    finished: Run, tmp_path: Path
) -> None:
    usual = changed(observe={"vantages": ["server"]}, federation={"tls": True})
    alone = fedsim.run(usual, out=tmp_path / "out", workers=1)

    def plain(rows: list[Row]) -> list[Row]:
        return [{k: v for k, v in row.items() if k != "cost"} for row in rows]

    assert plain(alone.rows()) == plain(seen_from(finished, "server"))


def test_an_encrypted_wire_shows_nothing_and_no_number_is_made_up(encrypted: Run) -> None:
    rows = seen_from(encrypted, "eavesdropper")
    assert len(rows) == 4
    for row in rows:
        assert row["status"] == "unseen" and "sizes and times" in row["reason"]
        assert set(row["metrics"].values()) == {None}
        per_image = row["baseline"].pop("per_image") or {}
        assert {*row["baseline"].values(), *per_image.values()} == {None}
    assert {row.vantage for row in leaderboard_rows([encrypted.out])} == {"server", "client"}
    shown = CliRunner().invoke(app, ["leaderboard", str(encrypted.out)])
    said = "4 attack runs had nothing to attack"
    assert said in shown.output
    assert said in encrypted.report.read_text(encoding="utf-8")


def test_an_encrypted_run_goes_on_without_doing_it_again(encrypted: Run) -> None:
    before = encrypted.rows()
    again = fedsim.run(changed(federation={"tls": True}), out=encrypted.out, workers=1, resume=True)
    assert again.rows() == before


AGGREGATE = {"none": [], "sum": ["aggregate"]}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"observe": {"vantages": ["spy"]}}, r"observe\.vantages"),
        ({"observe": {"vantages": []}}, r"observe\.vantages"),
        ({"observe": {"vantages": ["client", "client"]}}, "client is listed twice"),
        ({"observe": {"rounds": ["last"]}}, r"after the last round \(2\).*earlier"),
        ({"observe": {"rounds": [1, 2]}}, r"observe\.rounds\[1\].*after the last round"),
        ({"observe": {"batch_sizes": [1]}}, "no probe goes into the global model"),
        ({"federation": {"strategy": "FedAdam"}}, "FedAdam does not tell the clients' mean"),
        ({"defenses": AGGREGATE}, r"defenses\.sum.*aggregate is an ideal.*tls: true"),
        ({"data": {"clients": 1}, "observe": {"clients": [0]}}, "one client takes part"),
        ({"training": {"projection_radius": 1.0}}, "remove the radius"),
    ],
)
def test_what_is_not_defined_is_refused(
    tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(FedsimError, match=f"(?s){said}"):
        fedsim.run(changed(**sections), out=tmp_path / "out", workers=1)
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_a_learner_without_a_global_model_has_no_participant_to_look(tmp_path: Path) -> None:
    wanted = {
        "name": "rows",
        "data": {"source": "breast_cancer", "clients": 3},
        "learner": {"name": "least_squares", "columns": 60},
        "training": {"rounds": 1},
        "attacks": ["membership_inference"],
        "observe": {"batch_sizes": [8], "vantages": ["server", "client"]},
        "knowledge": {"rows": "others"},
    }
    with pytest.raises(FedsimError, match="no global model that a participant could see"):
        fedsim.run(wanted, out=tmp_path / "out", workers=1)


def test_behind_an_aggregation_an_encrypted_wire_may_be_listened_to(tmp_path: Path) -> None:
    wanted = changed(defenses=AGGREGATE, federation={"tls": True}, attacks=["label_inference"])
    rows = fedsim.run(wanted, out=tmp_path / "out", workers=1).rows()
    found = Counter((row["defense"]["name"], row["vantage"], row["status"]) for row in rows)
    assert found == {
        ("none", "server", "ok"): 2,
        ("none", "client", "ok"): 2,
        ("none", "eavesdropper", "unseen"): 2,
        ("sum", "aggregate", "ok"): 1,
        ("sum", "client", "ok"): 2,
        ("sum", "eavesdropper", "unseen"): 2,
    }
