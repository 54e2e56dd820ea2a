"""What a reader does on the page, done in a browser: every switch, filter, search and export."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from board_runs import FORMULA, HOSTILE
from browser import ENTER, ESCAPE, TAB, Browser

from fedsim.report import leaderboard_rows
from fedsim.report.row import LeaderboardRow


@pytest.fixture
def board(browser: Browser, page: str) -> Browser:
    """The page with nothing chosen; it is loaded again only if another one was open."""
    browser.prefer("light")
    if browser.address().partition("#")[0] == page:
        browser.run("document.getElementById('detail').close(); location.hash = '#'")
        browser.wait(lambda: "setting" in state(browser))
        browser.run("scrollTo(0, 0); document.activeElement.blur()")
    else:
        browser.open(page)
    return browser


def state(board: Browser) -> dict[str, str]:
    """What the address says is chosen."""
    return {k: v[0] for k, v in parse_qs(urlsplit(board.address()).fragment).items()}


def cells(board: Browser) -> list[str]:
    return board.texts("#matrix .cell")


def lines(runs: Path, **wanted: object) -> list[LeaderboardRow]:
    """Lines of the main run's leaderboard with the `wanted` fields."""
    rows = leaderboard_rows([runs / "main"])
    return [row for row in rows if all(getattr(row, k) == v for k, v in wanted.items())]


def test_the_page_opens_without_a_request_or_a_complaint(board: Browser) -> None:
    resources = board.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [name for name in resources if not name.startswith("data:")] == []
    assert board.complaints() == []


def test_first_is_a_valid_setting_at_its_last_round_by_psnr(board: Browser) -> None:
    chosen = state(board)
    assert chosen["setting"] == "photos-demo, photos, convnet"
    assert (chosen["batch"], chosen["round"], chosen["metric"]) == ("1", "3", "psnr")
    assert chosen["vantage"] == "server"
    assert "Positive control passed" in board.text("#status")


def test_the_matrix_shows_pictures_gain_interval_and_n_of_one_view(
    board: Browser, runs: Path
) -> None:
    [row] = [
        row
        for row in lines(runs, batch_size=1, round=3, vantage="server", defense="none")
        if row.attack == "inverting_gradients" and row.knowledge.labels == "inferred"
    ]
    assert row.gain is not None
    cell = board.text("#matrix tbody tr:first-child .cell").replace("−", "-")
    assert f"+{row.gain.mean:.1f} dB" in cell
    assert f"[{row.gain.low:+.1f}, {row.gain.high:+.1f}]" in cell
    assert f"n = {row.n_ok}/{row.n}" in cell
    size = "return document.querySelector('#matrix .cell img').naturalWidth"
    assert board.wait(lambda: board.run(size)) == 32
    assert len(cells(board)) == 6  # two attacks that recover images on three defenses


def test_the_headline_is_the_worst_attack_of_each_defense(board: Browser, runs: Path) -> None:
    members = [
        row
        for row in lines(runs, batch_size=1, round=3, vantage="server")
        if row.knowledge.labels == "inferred" and row.gain
    ]
    assert board.texts("#worst h3") == ["none", "pruning", "dp"]
    for name, shown in zip(["none", "pruning", "dp"], board.texts("#worst li"), strict=True):
        own = [row for row in members if row.defense == name]
        worst = max(own, key=lambda row: (not row.blind, row.gain.mean if row.gain else 0))
        assert worst.gain is not None
        gain = worst.gain.best_of(len(own))
        assert f"{gain.mean:+.1f} dB".replace("-", "−") in shown
        if gain.low is not None and gain.high is not None:
            ends = f"[{gain.low:+.1f}, {gain.high:+.1f}]".replace("-", "−")
            assert ends in shown
        assert worst.attack in shown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("setting", "weak"),
        ("threat", "labels=known"),
        ("vantage", "eavesdropper"),
        ("batch", "2"),
        ("round", "1"),
        ("metric", "label"),
    ],
)
def test_a_switch_shows_another_view_and_stands_in_the_address(
    board: Browser, name: str, words: str
) -> None:
    before = board.text("#matrix"), board.text("#matrix-view")
    board.choose(name, words)
    assert (board.text("#matrix"), board.text("#matrix-view")) != before
    caption = board.text("#matrix-view")
    assert words in caption
    assert words in state(board)[name]
    shown = board.run(
        "return [...document.querySelectorAll('#matrix .cell')].map((c) => Number(c.dataset.row))"
    )
    data = json.loads(board.run("return document.getElementById('board-data').textContent"))
    assert len({data["rows"][i]["view"] for i in shown}) == 1


def test_a_round_never_shows_the_figures_of_another(board: Browser, runs: Path) -> None:
    board.choose("round", "1")
    [row] = lines(runs, batch_size=1, round=1, defense="none", attack="inverting_gradients")
    assert row.gain is not None and row.gain.mean > 40
    assert f"+{row.gain.mean:.1f} dB" in board.text("#worst li")


def test_a_setting_whose_control_failed_is_marked_and_not_ranked(board: Browser) -> None:
    assert any(text.startswith("INVALID · weak") for text in board.options("setting"))
    board.choose("setting", "weak")
    assert "INVALID" in board.text("#validity")
    assert board.texts("#worst li") == []
    assert "▸" not in board.text("#matrix")
    assert board.run("return document.getElementById('utility-section').hidden")
    board.choose("scope", "all views")
    assert "weak" not in " ".join(board.texts("#rows tbody td"))
    board.click("#apart summary")
    assert "weak" in board.text("#apart") and "inverting_gradients" in board.text("#apart")


def test_a_setting_without_a_score_is_marked_and_kept_apart(board: Browser) -> None:
    assert any(text.startswith("UNSCORED · waiting") for text in board.options("setting"))
    assert "UNSCORED" in board.text("#notes")
    board.choose("setting", "waiting")
    assert "No attack of this setting is scored yet" in board.text("#status")
    assert cells(board) == []
    assert "waiting" in board.text("#apart")


def test_sorting_stays_within_a_view(board: Browser) -> None:
    board.choose("scope", "all views")
    board.click("#rows thead th:nth-child(3)")
    board.wait(lambda: state(board).get("sort") == "attack:asc")
    column = "#rows tbody td:nth-child({})"
    views, attacks = board.texts(column.format(1)), board.texts(column.format(3))
    groups = [view for i, view in enumerate(views) if i == 0 or view != views[i - 1]]
    assert len(groups) == len(set(groups)) > 1
    for group in groups:
        own = [attack for view, attack in zip(views, attacks, strict=True) if view == group]
        assert own == sorted(own)
    board.click("#rows thead th:nth-child(3)")
    board.wait(lambda: state(board).get("sort") == "attack:desc")


def test_the_table_is_sorted_by_what_leaks(board: Browser) -> None:
    assert "sort" not in state(board)
    board.click("#rows thead th:nth-child(3)")
    board.wait(lambda: state(board).get("sort") == "excess:asc")
    shown = board.texts("#rows tbody td:nth-child(3)")
    gains = [float(text.split(" ")[0].replace("−", "-")) for text in shown if text != "–"]
    assert gains == sorted(gains)


def test_filters_and_search_narrow_the_rows(board: Browser) -> None:
    assert "9 rows" in board.text(".dt-info")
    board.choose("defense", "pruning")
    assert set(board.texts("#rows tbody td:nth-child(1)")) == {"pruning"}
    board.choose("attack", "deep_leakage")
    assert "1 to 1 of 1 rows" in board.text(".dt-info")
    board.choose("defense", "every defense")
    board.choose("attack", "every attack")
    board.type("#search", "label_inf")
    assert set(board.texts("#rows tbody td:nth-child(2)")) == {"label_inference"}
    assert state(board)["search"] == "label_inf"
    board.type("#search", "zzz")
    assert "No row fits" in board.text("#rows")


def test_pages_turn(board: Browser) -> None:
    board.choose("scope", "all views")
    first = board.texts("#rows tbody tr")
    board.click(".dt-paging-button.next")
    assert board.texts("#rows tbody tr") != first


def test_an_address_restores_all_that_was_chosen(board: Browser) -> None:
    for name, words in [
        ("threat", "labels=known"),
        ("batch", "2"),
        ("metric", "label"),
        ("theme", "dark"),
        ("scope", "all views"),
        ("defense", "pruning"),
        ("attack", "label_inference"),
    ]:
        board.choose(name, words)
    board.type("#search", "photos")
    board.click("#rows thead th:nth-child(2)")
    board.wait(lambda: "sort" in state(board))
    address, chosen = board.address(), state(board)
    shown = [board.text("#matrix"), board.text("#rows"), board.text("#worst")]
    board.open(address)
    assert state(board) == chosen
    assert [board.text("#matrix"), board.text("#rows"), board.text("#worst")] == shown
    assert board.run("return document.documentElement.dataset.shade") == "dark"
    assert board.run("return document.getElementById('search').value") == "photos"


def test_an_address_with_nonsense_shows_what_there_is(board: Browser, page: str) -> None:
    board.open(f"{page}#setting=nowhere&batch=77&metric=%3Cb%3E&sort=x:y&defense=none-such")
    assert state(board)["batch"] == "1"
    assert len(cells(board)) == 6
    assert board.complaints() == []


def test_going_to_another_address_on_the_page_changes_the_view(board: Browser) -> None:
    board.run("location.hash = '#round=1'")
    board.wait(lambda: "round 1" in board.text("#matrix-view"))


def test_a_cell_opens_its_figures_by_the_keyboard(board: Browser) -> None:
    board.run("document.querySelector('#matrix .cell').focus()")
    board.press(ENTER)
    assert board.run("return document.getElementById('detail').open")
    shown = board.text("#detail")
    assert "inverting_gradients on none" in shown and "PSNR" in shown and "SSIM" in shown
    board.press(ESCAPE)
    board.wait(lambda: not board.run("return document.getElementById('detail').open"))
    assert board.run("return document.activeElement.classList.contains('cell')")


def test_every_control_is_reached_by_tab(board: Browser) -> None:
    board.run("document.body.focus()")
    reached = set()
    for _ in range(60):
        board.press(TAB)
        reached.add(
            board.run("return document.activeElement.id || document.activeElement.className")
        )
    wanted = {"theme", "setting", "threat", "vantage", "batch", "metric", "export-latex"}
    assert wanted | {"matrix", "export-csv", "search", "defense", "scope"} <= reached


def test_csv_holds_the_rows_that_are_shown(board: Browser) -> None:
    board.choose("defense", "pruning")
    text = board.download("#export-csv", "leaderboard.csv")
    records = list(csv.DictReader(io.StringIO(text)))
    assert [record["defense"] for record in records] == ["pruning"] * 3
    by_attack = {record["attack"]: record for record in records}
    gain = float(by_attack["inverting_gradients"]["psnr_excess"])
    assert f"{gain:+.1f} dB" in board.text("#rows tbody tr")
    assert by_attack["label_inference"]["psnr_mean"] == ""


def test_a_name_like_a_formula_is_no_formula_in_csv(board: Browser) -> None:
    board.choose("setting", "window.pwned")
    text = board.download("#export-csv", "leaderboard.csv")
    names = {record["attack"] for record in csv.DictReader(io.StringIO(text))}
    assert f"'{FORMULA}" in names and HOSTILE in names


def test_json_holds_shown_rows_and_those_kept_apart(board: Browser, runs: Path) -> None:
    board.choose("attack", "deep_leakage")
    document = json.loads(board.download("#export-json", "leaderboard.json"))
    assert {row["attack"] for row in document["rows"]} == {"deep_leakage"}
    assert all(row["valid"] for row in document["rows"])
    assert {row["setting"] for row in document["invalid_rows"]} == {"weak, photos, convnet"}
    [row] = [row for row in document["rows"] if row["defense"] == "pruning"]
    [line] = [
        line
        for line in lines(runs, defense="pruning", attack="deep_leakage", batch_size=1, round=3)
        if line.vantage == "server" and line.knowledge.labels == "inferred"
    ]
    assert line.gain is not None and row["psnr_excess"] == pytest.approx(line.gain.mean, rel=1e-4)


def test_latex_is_a_table_of_the_matrix(board: Browser) -> None:
    text = board.download("#export-latex", "leaderboard.tex")
    assert "\\begin{tabular}{lrrr}" in text and "\\bottomrule" in text
    assert "inverting\\_gradients" in text
    body = text.partition("\\midrule")[2].partition("\\bottomrule")[0].strip().splitlines()
    assert [line.split(" & ")[0] for line in body] == ["none", "pruning", "dp"]
    assert all(line.count(" & ") == 3 and line.endswith("\\\\") for line in body)
    assert "\\textbf{+" in body[0] and "$\\infty$" in body[0] and "7.82" in body[2]


def test_latex_escapes_every_special_sign(board: Browser) -> None:
    board.choose("setting", "window.pwned")
    text = board.download("#export-latex", "leaderboard.tex")
    plain = re.sub(r"\\[&%$#_{}]|\\[a-z]+", "", text.partition("\\midrule")[2])
    assert "\\&" in text and "&quot" not in plain


@pytest.mark.parametrize("name", ["utility", "claims"])
def test_a_chart_is_saved_as_svg_with_its_texts(board: Browser, name: str) -> None:
    root = ElementTree.fromstring(board.download(f"#export-{name}", f"{name}.svg"))  # noqa: S314
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    marks = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(marks) == (3 if name == "utility" else 2)
    assert {"A", "B", "C"} <= set(texts) if name == "utility" else "dp" in texts


def test_charts_say_in_words_what_they_show(board: Browser) -> None:
    label = "return document.querySelector('#{} svg').getAttribute('aria-label')"
    assert "none +" in board.run(label.format("utility"))
    assert "dp claimed 7.82 (1e-05, client, zero out), audited 9.5" in board.run(
        label.format("claims")
    )
    assert "refuted by the audit" in board.text("#claims-legend")
    assert "7.82 (1e-05, client, zero out)" in board.text("#utility-legend")


def test_defenses_that_a_view_lacks_are_named_with_a_way_to_them(
    browser: Browser, tmp_path: Path
) -> None:
    from board_runs import read, rewrite
    from synthetic_run import STACKS, write_run

    from fedsim.board import write_board

    stacks = {name: STACKS[name] for name in ("none", "dp")}
    run = write_run(tmp_path / "run", stacks=stacks, trials=2, batch_sizes=(1,), rounds=2)
    rows = read(run)
    for row in rows:
        if row["defense"]["name"] == "dp":
            row["vantage"] = "aggregate"
    rewrite(run, rows)
    browser.open(write_board([run], tmp_path / "page.html").as_uri())
    assert browser.texts("#worst h3") == ["none", "Not in this view"]
    browser.click("#worst li:last-child button")
    assert browser.texts("#worst h3") == ["dp", "Not in this view"]
    assert "seen from: aggregate" in browser.text("#matrix-view")
