"""Golden sentences: what the messages of a judgement say, and that none is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from answer_rows import FAILS, PROVEN, SAFE, WORKS, Lines, behind, changed, judged, trials
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.contracts.target import targets
from fedsim.report import judge, write_report
from fedsim.report import messages as words
from fedsim.report.judge import Reliance, missing_terms
from fedsim.words import printable

GOLDEN: dict[str, tuple[Lines, str]] = {
    "few": (
        SAFE[:2],
        "Behind dp, the server gets nothing certain beyond the guess; not shown: too few trials "
        "for an interval.",
    ),
    "at times": (
        trials([17.0, *FAILS[1:]]),
        "Behind dp, the server gets something in 1 of 5 trials, and nothing for certain; not "
        "shown: what it gets is more than guessing gives.",
    ),
    "recognizable at times": (
        [*trials([17.5, 18.8, 20.1], ssim=0.9), *trials(FAILS[:3], attack="idlg", ssim=0.1)],
        "Behind dp, the server gets recognizable pictures in all 3 trials; do not rely on it: the "
        "attack works.",
    ),
    "colors and labels": (
        trials([13.0, 13.1, 13.2, 13.3], label_accuracy=1.0),
        "Behind dp, the server gets colors and labels; do not rely on it: the attack works.",
    ),
    "failed": (
        trials([None, None, None]),
        "Behind dp, no attack measured: all of 3 attack runs failed, which is no protection; not "
        "shown: no attack was measured: inverting_gradients failed in 3 of 3 trials on dp: it "
        "diverged.",
    ),
    "some failed": (
        [*SAFE, trials([None] * 6, privacy=PROVEN)[5]],
        "Behind dp, the server gets nothing beyond the guess; not shown: 1 of 6 attack runs "
        "failed, which is no protection.",
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_brief_sentences(case: str, tmp_path: Path) -> None:
    lines, said = GOLDEN[case]
    assert words.brief(behind(tmp_path, lines)) == said


ATTACKERS: list[tuple[dict[str, Any], str]] = [
    ({"server": "planted"}, "a malicious server that planted weights gets"),
    ({"server": "modified"}, "a malicious server that put a module into the model gets"),
    ({"vantage": "client"}, "another participant gets"),
    ({"vantage": "eavesdropper"}, "an eavesdropper on the wire gets"),
    ({"vantage": "aggregate"}, "the server, which sees sums alone, gets"),
    (
        {"vantage": "client", "server": "planted"},
        "another participant, where a malicious server planted weights, gets",
    ),
]


@pytest.mark.parametrize(("case", "named"), ATTACKERS)
def test_who_attacks_is_named(case: dict[str, Any], named: str, tmp_path: Path) -> None:
    lines = trials([30.0, 31.0, 32.0, 33.0], defense="none", ssim=0.9, **case)
    (verdict,) = judged(tmp_path, lines).verdicts
    assert words._lead(verdict) == f"Without a defense, {named} recognizable pictures"


def test_whole_sentences(tmp_path: Path) -> None:
    plain, proven = judged(tmp_path, [*WORKS, *SAFE]).verdicts
    assert words.sentence(plain) == (
        "Without a defense, the server gets recognizable pictures: +20.0 dB over guessing, 95% "
        "interval +18.0 to +22.0 dB of this network and this client by inverting_gradients at "
        "batch size 1, n = 5 trials, SSIM 0.90; accuracy 90.0% of 1,000 test examples (88.0 to "
        "91.7%; chance 10.0%), seconds of a round not recorded; no guarantee (ε = ∞: no noise is "
        "added); do not rely on it: the attack works."
    )
    assert words.sentence(proven).endswith(
        "ε = 2 at δ = 1e-05 per client (zero out, gaussian); rely on it for what its ε promises, "
        "and no more."
    )
    invalid = trials([12.0, 12.1, 12.2], defense="none", label_accuracy=1.0)
    (verdict,) = judged(tmp_path / "invalid", invalid).verdicts
    assert words.sentence(verdict) == (
        "Without a defense, labels are recovered; of their inputs nothing can be said: 100% of "
        "labels recovered (guessing: 20%) by inverting_gradients, batch size 1, n = 3 trials; "
        "INVALID, for the attacks do not work here, which is no proof that others do not."
    )


def test_structure_is_told_beside_the_guess(tmp_path: Path) -> None:
    lines = trials([18.0, 18.1, 18.2], ssim=0.8)
    for row in lines:
        row["baseline"] = row["baseline"] | {"ssim": 0.6}
    assert "SSIM 0.80 (guess 0.60)" in words._describe_evidence(behind(tmp_path, lines))


@pytest.mark.parametrize("missing", ["delta", "unit", "relation"])
def test_no_epsilon_stands_without_its_terms(missing: str, tmp_path: Path) -> None:
    verdict = behind(tmp_path, trials(FAILS, privacy=PROVEN | {missing: None}))
    assert missing_terms(verdict.strongest) == (missing,)
    assert "ε =" not in words.sentence(verdict)


def test_no_message_is_missing() -> None:
    source = Path(judge.__file__).read_text(encoding="utf-8")
    stated = set(re.findall(r'_state\(\s*"([a-z ]+)"', source))
    assert stated <= set(words.STATEMENTS)
    assert set(words.RELIANCES) == set(get_args(Reliance))
    for part in targets():
        assert words.describe_statement(judge.Statement(kind=f"untried {part}"))


def test_terminal_page_and_json_print_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nasty = "dp\x1b[2Jx"
    each = judged(tmp_path, [*WORKS, *trials(FAILS, privacy=PROVEN, defense=nasty)])
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["leaderboard", str(tmp_path)]).stdout
    said, _, _ = re.sub(r"\s+", " ", shown).partition(" defense attack ")
    assert "\x1b" not in shown and max(map(len, shown.splitlines())) <= 80
    for verdict in each.verdicts:
        assert f"- {printable(words.brief(verdict))}" in said
    page = re.sub(r"<[^>]+>", "", write_report(tmp_path).read_text())
    assert words.brief(each.verdicts[0]) in page
    document = CliRunner().invoke(app, ["leaderboard", str(tmp_path), "--format", "json"]).stdout
    (judgement,) = json.loads(document)["judgements"]
    for verdict, plain in zip(each.verdicts, judgement["verdicts"], strict=True):
        assert plain["sentence"] == words.sentence(verdict)
        assert plain["reason"]["kind"] == verdict.reason.kind
        assert (plain["finding"], plain["reliance"]) == (verdict.finding, verdict.reliance)
    assert judgement["control"]["status"] == "passed"


def test_a_name_turns_no_words_of_the_page(tmp_path: Path) -> None:
    judged(tmp_path, [*WORKS, *trials(FAILS, defense="x\u202ey\u2066")])
    page = write_report(tmp_path).read_text()
    assert "Behind x" in page
    assert "\u202e" not in page and "\u2066" not in page


SHARES = {
    "membership": (
        {"membership_auc": 0.7},
        {"membership_auc": 0.5},
        ("membership_tpr_at_01_percent", 0.12, 0.09, 0.151),
        "12% (9.0% to 15%) of members at 0.1% false alarms, its threshold taken as exact",
    ),
    "source": (
        {"source_advantage": 0.5},
        {"source_advantage": 0.0, "source_accuracy": 0.25},
        ("source_accuracy", 0.62, 0.58, 0.66),
        "62% (58% to 66%) of records (chance 25%)",
    ),
}


@pytest.mark.parametrize("what", SHARES)
def test_answers_are_worded_as_shares_of_members_or_records(what: str, tmp_path: Path) -> None:
    """Two trials have no interval of their mean, so that the ends are those of a trial."""
    metrics, guess, (name, value, low, high), expected = SHARES[what]
    shares = {name: value, f"{name}_low": low, f"{name}_high": high}
    rows = changed(SAFE[:2], metrics=metrics | shares, baseline=guess)
    (told,) = words.describe_told(behind(tmp_path, rows))
    assert expected in told
    without = changed(SAFE, metrics=metrics, baseline=guess)
    assert "%" not in words.describe_told(behind(tmp_path, without))[0].partition("n =")[2]


def of_sources(defense: str, advantage: float, accuracy: float) -> Lines:
    """One answer about all clients, which has no other update, beside a few public images."""
    found = {"source_advantage": advantage, "source_accuracy": accuracy}
    beyond = {"source_advantage_beyond_chance": max(0.0, advantage - 0.08)}
    (row,) = trials([12.0], defense=defense, attack="source_inference")
    guess = {"name": "labels", "source_advantage": 0.0, "source_accuracy": 0.15}
    few = {"public": 359, "public_per_image": 0.7, "near_copies": 0}
    return [
        row
        | {"metrics": found | beyond, "baseline": guess | few, "control": {"other_update": None}}
    ]


def test_what_is_told_of_sources_is_an_answer_though_no_image_was_attacked(tmp_path: Path) -> None:
    """It has its figure, and no warning of a guess or a control that it does not need."""
    lines = [*of_sources("none", 0.3, 0.4), *of_sources("dp", 0.02, 0.17)]
    plain, defended = judged(tmp_path, lines).verdicts
    assert "gets which client holds a record: it names the right client for 40%" in words.brief(
        plain
    )
    said = words.brief(defended)
    assert "nothing certain about which client holds a record: it names" in said
    assert "for 17% of records (chance 15%); not shown: no attack on images" in said
    assert "by source_inference" in words._describe_evidence(defended)
    assert not words.warnings([plain.strongest, defended.strongest])
    assert not plain.strongest.warnings


def test_what_leaks_on_average_is_named_where_no_picture_was_attacked(tmp_path: Path) -> None:
    lines = [*of_sources("none", 0.3, 0.4), *of_sources("dp", 0.09, 0.22)]
    lines[1]["metrics"]["source_advantage_beyond_chance"] = 0.0
    said = words.brief(judged(tmp_path, lines).verdicts[1])
    assert "gets something about which client holds a record on average" in said


@pytest.mark.parametrize(
    ("guess", "said"), [(0.03, "no attack can be told from it"), (0.3, "where 0.200 is required")]
)
def test_a_control_asks_for_no_error_below_zero(guess: float, said: str, tmp_path: Path) -> None:
    (row,) = trials([12.0], defense="none", attack="property_inference")
    row |= {"metrics": {"client_column_error": guess - 0.01}, "control": {"other_update": None}}
    row |= {"baseline": {"client_column_error": guess}}
    text = words.describe_control(judged(tmp_path, [row]).control)
    assert said in text and "−" not in text
    assert ("observe.rounds" in text) == (guess == 0.3)


def test_a_leak_below_the_control_is_not_said_to_be_none(tmp_path: Path) -> None:
    """An advantage of 0.2 leaks for certain, and is less than what the control asks for."""
    for advantage, said in ((0.2, "leaks for certain without a defense"), (0.0, "do not work")):
        lines = [*of_sources("none", advantage, 0.3), *of_sources("dp", 0.02, 0.17)]
        for verdict in judged(tmp_path, lines).verdicts:
            assert verdict.finding == "no answer" and said in words.brief(verdict)
