"""Every term is explained once, and the page shows the explanation where the term stands."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedsim.report import leaderboard_rows, write_report
from fedsim.report.glossary import (
    _keep_figures_whole,
    explain_terms,
    mark_code,
    terms,
    terms_of,
    tip,
)
from fedsim.scoring import METRICS


def test_every_metric_of_a_table_has_a_term() -> None:
    shown = [metric for metric in METRICS.values() if metric.heading]
    assert {metric.term.key for metric in shown} <= set(terms())


def test_a_metric_without_a_term_is_explained_by_its_heading() -> None:
    term = replace(METRICS["ssim"], name="edge_f1", described=None, meaning="share of edges").term
    assert (term.key, term.name, term.meaning) == ("edge-f1", "SSIM", "Share of edges.")


def test_every_button_of_a_page_opens_an_explanation_that_is_there(run_folder: Path) -> None:
    html = write_report(run_folder).read_text()
    targets = set(re.findall(r'popovertarget="([^"]+)"', html))
    targets = {target for target in targets if target.startswith("tip-")}
    explanations = set(re.findall(r'<div popover id="([^"]+)"', html))
    assert {"tip-gain", "tip-epsilon", "tip-psnr", "tip-guess"} <= targets
    assert targets <= explanations
    for term in terms_of(leaderboard_rows([run_folder])):
        assert html.count(f'popover id="tip-{term.key}"') == 1


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
