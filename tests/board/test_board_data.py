"""The document behind the page: nothing is ranked with another view, and figures are the rows'."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from board_runs import read, rewrite
from synthetic_run import STACKS, write_run

from fedsim.board.data import METRIC_FIELDS, board_data
from fedsim.board.ranking import excess, state_of, views, worst_attacks
from fedsim.report import leaderboard_rows, write_report
from fedsim.report.row import LeaderboardRow
from fedsim.types import FedsimError


@pytest.fixture(scope="module")
def rows(runs: Path) -> list[LeaderboardRow]:
    return leaderboard_rows([runs / "main"])


def test_a_view_differs_in_defense_and_attack_alone(rows: list[LeaderboardRow]) -> None:
    by_view = views(rows)
    assert sorted(i for members in by_view.values() for i in members) == list(range(len(rows)))
    for members in by_view.values():
        own = [rows[i] for i in members]
        for name in ("comparison", "knowledge", "vantage", "masked", "batch_size", "round"):
            assert len({str(getattr(row, name)) for row in own}) == 1, name
    assert (
        len(by_view) == 2 * 4
    )  # two batch sizes; last round, earlier one, known labels, overheard


def test_masked_parts_are_a_vantage_of_their_own(rows: list[LeaderboardRow]) -> None:
    one = rows[0]
    assert len(views([one, replace(one, masked=True)])) == 2


def one_view(rows: list[LeaderboardRow]) -> list[LeaderboardRow]:
    members = next(iter(views(rows).values()))
    return [rows[i] for i in members]


def test_the_worst_attack_leaks_most_of_those_that_read_the_update(
    rows: list[LeaderboardRow],
) -> None:
    own = one_view(rows)
    chosen = worst_attacks(own, "psnr")
    assert next(iter(chosen)) == "none"
    for name, worst in chosen.items():
        rivals = [row for row in own if row.defense == name and row.gain]
        best = own[worst.row]
        assert worst.compared == len(rivals) == 2
        assert best.gain is not None and worst.gain == best.gain.best_of(2)
        if worst.state == "ranked":
            ranked = [row for row in rivals if state_of(row, "psnr") == "ranked"]
            assert excess(best, "psnr") == max(excess(row, "psnr") or 0.0 for row in ranked)


def test_an_attack_that_ignores_the_update_is_behind_all_that_do_not(
    rows: list[LeaderboardRow],
) -> None:
    own = [row for row in one_view(rows) if row.defense == "none" and row.gain]
    weak = min(own, key=lambda row: excess(row, "psnr") or 0.0)
    [strong] = [row for row in own if row is not weak]
    assert strong.over_other is not None and strong.own_gain is not None
    blind = replace(
        strong,
        over_others={"psnr": replace(strong.over_other, mean=0.0, low=-1.0, high=1.0)},
        own_gains={"psnr": replace(strong.own_gain, max=0.0)},
    )
    assert state_of(blind, "psnr") == "blind"
    assert worst_attacks([blind, weak], "psnr")["none"].row == 1
    assert worst_attacks([blind], "psnr")["none"].state == "blind"
    assert state_of(replace(strong, n_ok=0), "psnr") == "failed"


def test_a_metric_that_shrinks_leaks_more_below_the_guess(rows: list[LeaderboardRow]) -> None:
    row = next(row for row in rows if row.metrics["rmse"])
    value, guess = row.metrics["rmse"], row.baseline["rmse"]
    assert value is not None and guess is not None
    assert excess(row, "rmse") == pytest.approx(guess - value.mean)


def test_the_document_has_the_rows_own_figures(runs: Path, rows: list[LeaderboardRow]) -> None:
    data = board_data([runs / "main"])
    assert len(data["rows"]) == len(rows)
    for entry, row in zip(data["rows"], rows, strict=True):
        assert data["texts"][entry["defense"]] == row.defense
        assert (entry["n"], entry["ok"]) == (row.n, row.n_ok)
        assert entry["epsilon"] == ("inf" if row.epsilon == math.inf else row.epsilon)
        for name, values in entry["metrics"].items():
            figures, summary = dict(zip(METRIC_FIELDS, values, strict=True)), row.metrics[name]
            assert summary is not None
            assert figures["mean"] == pytest.approx(summary.mean, rel=1e-5)
            assert figures["worst"] == pytest.approx(row.worst[name], rel=1e-5)
    json.dumps(data, allow_nan=False)


def test_an_audit_of_the_run_stands_beside_the_claim(runs: Path) -> None:
    [setting] = board_data([runs / "main"])["settings"]
    [claim] = [claim for claim in setting["claims"] if claim["defense"] == "dp"]
    assert (claim["epsilon"], claim["audited"]) == (7.82, 9.5)
    assert claim["claim"] == "7.82 (1e-05, client, zero out)"


def test_what_is_claimed_is_never_rounded_down(tmp_path: Path) -> None:
    stacks = {"none": STACKS["none"], "dp": replace(STACKS["dp"], epsilon=20.1402)}
    run = write_run(tmp_path / "run", stacks=stacks, trials=1, batch_sizes=(1,), rounds=1)
    data = board_data([run])
    assert any(text.startswith("20.2 (") for text in data["texts"])
    assert {row["epsilon"] for row in data["rows"]} == {"inf", 20.1402}


def test_equal_images_are_held_once(runs: Path) -> None:
    data = board_data([runs / "main"])
    assert len(data["pictures"]) == len(set(data["pictures"]))
    pairs = [pair for row in data["rows"] for pair in row.get("pictures", {}).get("pairs", [])]
    assert len({pair[0] for pair in pairs}) < len(pairs)
    assert all(address.startswith("data:image/png;base64,") for address in data["pictures"])


def test_a_page_of_too_many_pixels_leaves_images_out_and_says_so(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = board_data([runs / "main"])
    monkeypatch.setattr("fedsim.board.pictures.PIXELS", 5000)
    data = board_data([runs / "main"])
    assert data["pictures_omitted"] > 0 and 0 < len(data["pictures"]) < len(whole["pictures"])


def test_a_run_that_attacks_nothing_shows_its_claims(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        stacks={"dp": STACKS["dp"]},
        attacks={},
        trials=1,
        batch_sizes=(1,),
        rounds=2,
    )
    (run / "results.jsonl").write_text("")
    (run / "scenario.yaml").write_text("name: quiet\nattacks: []\n")
    [setting] = board_data([run])["settings"]
    assert not setting["attacked"]
    assert [claim["defense"] for claim in setting["claims"]] == ["dp"]


def test_an_answer_is_short_with_its_grounds_beside_it(runs: Path) -> None:
    """The report's own words: `brief`, and what it is shown by, costs and promises."""
    data = board_data([runs / "main"])
    found = [one for each in data["comparisons"] for one in each["answers"].values()]
    named = [dict(one["grounds"]) for one in found]
    assert any({"It costs", "It promises"} <= set(each) for each in named)
    for one, grounds in zip(found, named, strict=True):
        assert all(words not in one["brief"] for words in grounds.values())


@pytest.mark.parametrize("value", [1e308, -1e308])
def test_a_figure_beyond_all_sums_is_refused_in_words(value: float, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trials=2, batch_sizes=(1,), rounds=1)
    rows = read(run)
    rows[0]["metrics"]["psnr"] = value
    rewrite(run, rows)
    with pytest.raises(FedsimError, match=r"line 1: metrics: .*expected at most 1e\+100 in size"):
        board_data([run])
    with pytest.raises(FedsimError, match=r"expected at most 1e\+100 in size"):
        write_report(run)


def test_rows_without_a_model_are_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trials=2, batch_sizes=(1,), rounds=1)
    rows = read(run)
    for row in rows:
        row["model"] = None
    rewrite(run, rows)
    assert write_report(run).exists()
    assert board_data([run])["rows"]
