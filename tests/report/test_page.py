"""The page of runs: whole, self-contained, escaped, explained, showing what the rows say."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from answer_rows import save
from safetensors.torch import save_file
from synthetic_run import write_run

from fedsim.report import describe, load_runs, utility, write_page, write_report
from fedsim.report.content import Content
from fedsim.report.dossier import dossier_of
from fedsim.report.glossary import _keep_figures_whole, explain_terms, mark_code, terms, tip
from fedsim.results.record import read_lines, write_lines
from fedsim.scoring import METRICS
from fedsim.types import FedsimError

VOID = {"meta", "img", "br", "link", "wbr", "input"}


class Page(HTMLParser):
    """Elements, attributes and visible text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data

    @property
    def flat(self) -> str:
        return re.sub(r"\s+", " ", self.text)

    def values(self, name: str) -> list[str]:
        return [value for _, found in self.elements if (value := found.get(name)) is not None]


Edit = Callable[[dict[str, Any]], None]


def edited(source: Path, target: Path, edit: Edit) -> Path:
    shutil.copytree(source, target)
    rows = read_lines(target / "results.jsonl")
    for row in rows:
        edit(row)
    write_lines(target / "results.jsonl", rows)
    return target


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text())


@pytest.fixture(scope="session")
def page(run_folder: Path) -> Page:
    return page_of(run_folder)


@pytest.fixture(scope="session")
def content(run_folder: Path) -> Content:
    return Content(load_runs([run_folder]))


def test_it_is_written_where_asked_and_is_the_leaderboard_of_one_run(
    run_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "page.html"
    assert write_report(run_folder, out) == out
    assert write_report(run_folder) == run_folder / "report.html"
    assert write_page([run_folder], tmp_path / "board.html").read_text() == out.read_text()
    assert out.read_text() == (run_folder / "report.html").read_text()


def test_nothing_is_fetched_and_one_script_may_run(page: Page) -> None:
    policy = next(a for _, a in page.elements if a.get("http-equiv"))["content"] or ""
    (script,) = re.findall(r"<script>(.*?)</script>", page.html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "connect-src 'none'" in policy
    assert page.open == []
    for tag, attributes in page.elements:
        assert tag not in {"iframe", "object", "embed", "base", "form"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"src", "href", "xlink:href", "srcset", "action", "data"}:
                assert (value or "").startswith(("data:image/png;base64,", "data:,", "#"))


def test_every_cell_opens_its_details_and_every_button_has_a_target(
    page: Page, content: Content
) -> None:
    assert max(Counter(page.values("id")).values()) == 1
    assert set(page.values("popovertarget")) <= set(page.values("id"))
    assert {"tip-gain", "tip-epsilon", "tip-psnr", "tip-guess"} <= set(page.values("popovertarget"))
    assert {href[1:] for href in page.values("href") if href.startswith("#")} <= set(
        page.values("id")
    )
    (section,) = content.sections
    assert [row.verdict.defense for row in section.defenses] == ["none", "pruning", "dp"]
    cells = [line for row in section.defenses for lines in row.cells for line in lines]
    assert sorted(line.row.cell for line in cells) == sorted(row.cell for row in content.rows)
    assert all(len(row.cells) == len(section.columns) == 6 for row in section.defenses)
    assert {line.id for line in cells} <= set(page.values("popovertarget"))


def test_a_column_mixes_no_two_views(content: Content) -> None:
    one = content.rows[0]
    others = [
        replace(one, cell="a", round=one.round + 1),
        replace(one, cell="b", batch_size=one.batch_size + 1),
        replace(one, cell="c", attack="another"),
    ]
    several = Content(content.runs)
    several.rows = [one, *others]  # type: ignore[misc]
    (section,) = several.sections
    assert len(section.columns) == 4
    assert all(len(lines) == 1 for lines in section.defenses[0].cells)


def sizes(page: Page, name: str) -> set[str | None]:
    return {attributes[name] for tag, attributes in page.elements if tag == "img"}


def test_a_column_shows_the_same_image_behind_every_defense(page: Page, content: Content) -> None:
    (section,) = content.sections
    shown: dict[tuple[int, int], set[str]] = {}
    for line in section.lines:
        if line.plate and line.row.attack == "inverting_gradients":
            place = (line.row.batch_size, line.row.round)
            shown.setdefault(place, set()).add(line.plate.pairs[0].truth)
            assert line.plate.width == line.plate.height == 64
    assert shown and all(len(images) == 1 for images in shown.values())
    assert {size for name in ("width", "height") for size in sizes(page, name)} == {"64"}
    assert all(a["alt"] for tag, a in page.elements if tag == "img")


def test_a_page_of_too_many_pixels_says_how_many_pictures_it_lacks(
    run_folder: Path, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.report.pictures._PIXELS", 5000)
    few = Content(load_runs([run_folder]))
    assert few.without_pictures > content.without_pictures == 0
    assert any(line.plate for line in few.sections[0].lines)


@pytest.mark.parametrize("damage", ["empty", "no tensors", "missing"])
def test_a_picture_that_cannot_be_read_is_said(
    damage: str, run_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    for path in folder.rglob("inverting_gradients/*/*.safetensors"):
        if damage == "missing":
            path.unlink()
        elif damage == "empty":
            save_file({}, path)
        else:
            path.write_bytes(b"no tensors")
    assert ("picture cannot be read" in page_of(folder).flat) is (damage != "missing")


NASTY = "<font><a href='x'><script>alert(1)</script>\"'><img src=x onerror=alert(2)>${{7*7}}"


def test_no_name_or_reason_becomes_markup_and_long_ones_are_cut(
    run_folder: Path, tmp_path: Path
) -> None:
    def poison(row: dict[str, Any]) -> None:
        row |= {"scenario": NASTY, "dataset": NASTY, "variant": {NASTY: NASTY}}
        row["model"]["name"] = row["attack"]["label"] = row["vantage"] = NASTY
        row["defense"] = {"name": NASTY + row["defense"]["name"], "stack": [{"name": NASTY}]}
        row["privacy"] |= dict.fromkeys(("accountant", "unit", "relation", "reason"), NASTY)
        if row["status"] == "failed":
            row["reason"] = NASTY + "x" * (1 << 20)

    folder = edited(run_folder, tmp_path / "run", poison)
    (folder / "scenario.yaml").write_text(
        f"name: {json.dumps(NASTY)}\ndescription: {json.dumps(NASTY)}\n"
    )
    (folder / "record.json").write_text(
        json.dumps({"notes": {NASTY: NASTY}, "device": NASTY, "environment": {"commit": NASTY}})
    )
    rounds = read_lines(folder / "rounds.jsonl")
    write_lines(folder / "rounds.jsonl", [{**row, "details": [NASTY]} for row in rounds])
    page, dossier = page_of(folder), Page(dossier_of(load_runs([folder]), folder))
    for each, scripts in ((page, 1), (dossier, 0)):
        assert each.html.count("<script") == scripts and "<img src=x" not in each.html
        assert all(not name.startswith("on") for _, a in each.elements for name in a)
        assert not {tag for tag, _ in each.elements} & {"font", "iframe", "form"}
    targets = [link for name in ("href", "src") for link in dossier.values(name)]
    assert all(link.startswith(("#", "data:image/png")) for link in targets)
    assert page.text.count("alert(1)") > 20 and "{{7*7}}" in page.text
    assert "x" * 2000 not in page.html and "characters)" in page.text


def test_it_says_what_was_run_and_what_it_took(page: Page) -> None:
    for words in (
        "54 attack runs, 2 of which failed",
        "ε = 7.82 at δ = 1e-05 per client (zero out, gaussian)",
        "no restart ended at a finite loss (losses: (nan,))",
        "client 3 did not answer within 600 s",
        "torchvision's cache has no alexnet-owt-7be5be79.pth",
        "0123456789abcdef0123456789abcdef01234567",
        "fedsim run scenario.yaml",
        "Not tried here: who took part (membership)",
    ):
        assert words in page.flat.replace("\N{NO-BREAK SPACE}", " "), words
    assert "INVALID" not in page.flat


def test_intervals_name_their_population(page: Page, content: Content) -> None:
    (section,) = content.sections
    assert section.population in page.flat
    leakage = next(f for f in section.figures if f.title == "Leakage against accuracy")
    assert section.population in leakage.note and "95%" in leakage.note
    assert [name for name, _ in leakage.legend] == ["1 none", "2 pruning", "3 dp"]


@pytest.mark.parametrize(
    ("gains", "mark"),
    [((0.3,), "INVALID"), ((0.3, 0.3), "INVALID"), ((1.0, 0.3), "INVALID in part"), ((1.0,), "")],
)
def test_a_failed_positive_control_marks_the_page(
    gains: tuple[float, ...], mark: str, tmp_path: Path
) -> None:
    for number, gain in enumerate(gains):
        variant = {"x": number} if len(gains) > 1 else {}
        write_run(tmp_path / str(number), undefended=gain, variant=variant)
    content = Content(load_runs([tmp_path]))
    assert content.mark == content.invalid_mark == mark
    failed = [section for section in content.sections if section.judged.control.mark]
    assert len(failed) == sum(gain < 1 for gain in gains)
    for section in failed:
        assert not any(line.tint for line in section.lines)
        assert not [f for f in section.figures if f.title == "Leakage against accuracy"]
        assert {row.verdict.finding for row in section.defenses} == {"no answer"}
    page = page_of(tmp_path)
    title = page.html[page.html.index("<title>") :]
    assert title.startswith(f"<title>{mark}: " if mark else "<title>photos-demo")
    assert page.html.count("<strong>INVALID") == (1 + len(failed) if mark else 0)


def test_a_sweep_has_a_section_for_each_variant_and_a_line_above_all(tmp_path: Path) -> None:
    for mode in ("train", "eval"):
        write_run(tmp_path / mode, variant={"training.local.mode": mode})
    page = page_of(tmp_path)
    glance = page.html[page.html.index('class="glance"') : page.html.index('id="c1"')]
    assert re.findall(r'href="#(c\d)"', glance) == ["c1", "c2"]
    assert glance.count('class="pill') == 4
    for mode in ("train", "eval"):
        assert f"photos-demo (training.local.mode={mode}), photos, convnet" in page.flat


def test_a_run_without_results_or_extras_still_has_a_page(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("")
    assert "INVALID" in page_of(tmp_path).flat
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    shutil.copy(run_folder / "results.jsonl", lonely)
    page = page_of(lonely)
    assert not [a for t, a in page.elements if t == "img"]
    assert "inverting_gradients" in page.flat


def test_a_run_that_attacks_nothing_shows_what_defenses_cost(tmp_path: Path) -> None:
    losses = {("1", 1): 0.5, ("1", 2): 0.7, ("10", 1): 0.2, ("10", 2): 0.2}
    for (columns, seed), loss in losses.items():
        folder = tmp_path / f"{columns}-{seed}"
        none, own = {"defense": "none", "epsilon": "inf"}, {"defense": "own", "epsilon": seed}
        lines = [
            none | {"round": 1, "test_loss": 9.0},
            none | {"round": 2, "test_loss": loss},
            own | {"round": 2, "test_accuracy": loss, "sigma": 4},
        ]
        save(folder, [], lines)
        (folder / "scenario.yaml").write_text("name: private\nattacks: []\n")
        variant = {"learner.columns": int(columns), "seed": seed}
        (folder / "record.json").write_text(json.dumps({"variant": variant}))
    page = page_of(tmp_path)
    assert "Nothing is attacked in this run" in page.flat
    assert "INVALID" not in page.flat and "PSNR" not in page.flat
    assert "learner.columns=1none2∞––0.600–" in page.flat
    unknown = "(δ unknown, unit unknown, neighbours unknown)"
    assert f"learner.columns=1own22 {unknown}–4.000–60.0" in page.flat
    assert "learner.columns=10none2∞––0.200–" in page.flat
    once = utility(load_runs([tmp_path]))
    shutil.copytree(tmp_path / "1-2", tmp_path / "copy")
    assert utility(load_runs([tmp_path])) == once, "a copy is no run of its own"
    told = describe(once).splitlines()
    assert told[:2] == [
        "learner.columns=1, none: ε ∞, test loss 0.600",
        f"learner.columns=1, own: ε 2 {unknown}, σ 4.000, accuracy 60.0%",
    ]
    assert len(told) == 4


def test_what_was_not_measured_is_not_drawn(run_folder: Path, tmp_path: Path) -> None:
    def strip(row: dict[str, Any]) -> None:
        row |= {"utility": None, "privacy": None, "cost": None, "control": None}

    folder = edited(run_folder, tmp_path / "run", strip)
    first = [
        text for text in (folder / "rounds.jsonl").read_text().splitlines() if '"round": 1' in text
    ]
    titles = ["Leakage against accuracy", "Training"]
    (section,) = Content(load_runs([run_folder])).sections
    assert [figure.title for figure in section.figures] == titles
    (folder / "rounds.jsonl").write_text("\n".join(first) + "\n")  # a point is no curve
    (section,) = Content(load_runs([folder])).sections
    assert not section.figures
    assert "privacy not accounted" in page_of(folder).flat


@pytest.mark.parametrize("value", [1e308, -1e308])
def test_a_figure_beyond_all_sums_is_refused_in_words(
    value: float, run_folder: Path, tmp_path: Path
) -> None:
    def enlarge(row: dict[str, Any]) -> None:
        if row["metrics"]:
            row["metrics"]["psnr"] = value

    with pytest.raises(FedsimError, match=r"expected at most 1e\+100 in size"):
        write_report(edited(run_folder, tmp_path / "run", enlarge))


def test_every_metric_of_a_table_has_a_term() -> None:
    shown = [metric for metric in METRICS.values() if metric.heading]
    assert {metric.term.key for metric in shown} <= set(terms())


def test_a_metric_without_a_term_is_explained_by_its_heading() -> None:
    term = replace(METRICS["ssim"], name="edge_f1", described=None, meaning="share of edges").term
    assert (term.key, term.name, term.meaning) == ("edge-f1", "SSIM", "Share of edges.")


@pytest.mark.parametrize(
    "token",
    ["ε = 7.82", "δ = 1e-05", "+16.9 dB", "n = 6 trials", "−4.2 to +4.0 dB", "83.5 to 98.6%"],
)
def test_no_figure_breaks_from_its_unit(token: str) -> None:
    kept = token.replace(" ", "\N{NO-BREAK SPACE}")
    assert _keep_figures_whole(f"it is {token}, so") == f"it is {kept}, so"
    assert (
        re.sub("<[^>]+>", "", explain_terms(f"it is {token}, so", terms())) == f"it is {kept}, so"
    )


def test_a_term_is_a_button_once_and_only_where_it_is_explained() -> None:
    assert explain_terms("3 dB, 4 dB", terms()).count("<button") == 1
    assert "<button" not in explain_terms("3 dB", shown=["psnr"])
    assert 'popovertarget="tip-db"' in explain_terms("3 dB", terms())
    assert "<button" not in explain_terms("bandB and interval_length", terms()), "no part of a word"


def test_names_stay_text() -> None:
    nasty = '<b onclick=x>"ε = 3"</b>&'
    for marked in (explain_terms(nasty, terms()), tip("gain", nasty)):
        assert "<b" not in re.sub("<button|<br", "", marked)
        assert "&lt;b onclick" in marked


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("try `fedsim list attacks`, <b>", "try <code>fedsim list attacks</code>, &lt;b&gt;"),
        ("one ` alone, <b>", "one ` alone, &lt;b&gt;"),
    ],
)
def test_backticks_mark_code_and_all_else_is_escaped(text: str, marked: str) -> None:
    assert mark_code(text) == marked
