"""One sentence per defense: each rule of the answer, by figures that are known."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from answer_rows import FAILS, PROVEN, WORKS, answered, behind, trial, trials
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.report import load_runs, write_report
from fedsim.report.answers import answers_of
from fedsim.scoring import student_interval
from fedsim.words import printable


def test_a_working_attack_says_what_it_gets_with_interval_and_n(tmp_path: Path) -> None:
    (answer,) = answered(tmp_path, WORKS)
    low, high = student_interval([18.0, 19.0, 20.0, 21.0, 22.0])
    assert answer.sentence == (
        "Without a defense, the server gets recognizable pictures: +20.0 dB over guessing, 95% "
        f"interval {low:+.1f} to {high:+.1f} dB of this network and this client by "
        "inverting_gradients at batch size 1, n = 5 trials; accuracy 90.0% of 1,000 "
        "test examples (88.0 to 91.7%; chance 10.0%), seconds of "
        "a round not recorded; no guarantee (ε = ∞: no noise is added); do not rely on it: the "
        "attack works."
    )


@pytest.mark.parametrize(
    ("values", "ssim", "finding"),
    [
        ([18.0, 18.1, 18.2, 18.3, 18.4], 0.5, "recognizable"),
        ([18.0, 18.1, 18.2, 18.3, 18.4], 0.49, "colors only"),
        ([13.0, 13.1, 13.2, 13.3, 13.4], 0.9, "colors only"),
        (FAILS, 0.9, "nothing"),
        ([30.0, 12.0, 12.0, 12.0, 12.1], 0.1, "recognizable"),  # one trial of 18 dB
        ([17.0, 11.9, 11.9, 11.9, 11.9], 0.1, "some trials"),
    ],
)
def test_a_finding_follows_gain_and_likeness(
    values: list[float], ssim: float, finding: str, tmp_path: Path
) -> None:
    assert behind(tmp_path, values, ssim=ssim).finding == finding


@pytest.mark.parametrize(
    ("values", "times", "count"),
    [
        ([17.0, 11.9, 11.9, 11.9, 11.9], "in 1 of 5 trials", "1 of 5"),
        ([15.1, 15.2, 21.5], "in all 3 trials", "3 of 3"),  # the interval reaches below 0 dB
    ],
)
def test_how_often_something_leaks_is_told_as_it_is_counted(
    values: list[float], times: str, count: str, tmp_path: Path
) -> None:
    """A gain of 3 dB in each of few trials is not certain, and is no gain in some of them."""
    answer = behind(tmp_path, values, ssim=0.1)
    assert answer.finding == "some trials"
    assert answer.gets == f"gets something {times}, and nothing for certain"
    assert f"{count} with 3 dB or more" in answer.evidence
    assert answer.judgement.headline == f"Gain {times}"
    assert f" I{times[1:]} inverting_gradients gained" in answer.judgement.sentence
    assert "some trials" not in f"{answer.sentence} {answer.judgement.sentence}"


def test_a_verdict_has_the_words_of_its_answer(tmp_path: Path) -> None:
    """The mean is certainly above 0 and not above 3 dB; each trial is recognizable."""
    best = trials([17.5, 18.8, 20.1], ssim=0.9)
    others = trials([12.0, 12.1, 12.2], attack="idlg", ssim=0.1)
    _, answer = answered(tmp_path, [*WORKS, *best, *others])
    assert answer.gets == "gets recognizable pictures in all 3 trials"
    verdict = answer.judgement
    assert verdict.level == "partial"
    assert verdict.headline == "Recognizable pictures in all 3 trials"
    assert (
        f"(interval of that share 23 to 100% {answer.judgement.strongest.population})"
        in answer.evidence
    )
    assert (
        f"23 to 100% {verdict.strongest.population}, allowing for the best of 2."
        in verdict.sentence
    )
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "3 of 3 (29 to 100%)" in page and "of each attack alone" in page
    assert "Some leakage" not in page


@pytest.mark.parametrize(("values", "finding"), [([20.0, 20.1, 20.2], "recognizable"),
                                                 ([19.7, 19.8, 19.9], "colors only")])  # fmt: skip
def test_without_ssim_pixels_decide(values: list[float], finding: str, tmp_path: Path) -> None:
    assert behind(tmp_path, values).finding == finding


def test_only_a_guarantee_that_no_attack_contradicts_is_relied_on(tmp_path: Path) -> None:
    answer = behind(tmp_path, FAILS, privacy=PROVEN)
    assert (answer.verdict, answer.finding) == ("rely", "nothing")
    assert answer.sentence.endswith(
        "ε = 2 at δ = 1e-05 per client (zero out, gaussian); rely on it for what its ε promises, "
        "and no more."
    )


@pytest.mark.parametrize(
    ("change", "verdict", "why"),
    [
        ({"epsilon": "inf", "reason": "x"}, "not shown", "no guarantee says that others will"),
        ({"epsilon": None}, "not shown", "no guarantee says that others will"),
        ({"epsilon": 10.0}, "not shown", "an ε of 10 promises next to nothing"),
        ({"epsilon": 9.9}, "rely", "for what its ε promises"),
        ({"delta": 0.002}, "not shown", "its δ is above 0.001"),
        ({"delta": None}, "not shown", "does not state δ"),
        ({"unit": None}, "not shown", "does not state its unit"),
        ({"relation": None}, "not shown", "does not state its neighbours"),
        ({"relation": "close"}, "not shown", "no differential privacy"),
        ({"relation": "relative"}, "not shown", "no differential privacy"),
        ({"audited_epsilon": 2.1}, "do not rely", "the audit refutes its ε"),
        ({"audited_epsilon": 1.9}, "rely", "for what its ε promises"),
    ],
)
def test_what_a_guarantee_lacks_is_the_reason(
    change: dict[str, Any], verdict: str, why: str, tmp_path: Path
) -> None:
    answer = behind(tmp_path, FAILS, privacy=PROVEN | change)
    assert answer.verdict == verdict
    assert why in answer.reason


@pytest.mark.parametrize("missing", ["delta", "unit", "relation"])
def test_no_epsilon_stands_without_its_terms(missing: str, tmp_path: Path) -> None:
    answer = behind(tmp_path, FAILS, privacy=PROVEN | {missing: None})
    assert "ε =" not in answer.sentence
    assert "so that its ε says nothing" in answer.guarantee


def test_a_proven_defense_that_leaks_is_not_relied_on(tmp_path: Path) -> None:
    answer = behind(tmp_path, [18.0, 18.1, 18.2, 18.3], privacy=PROVEN, ssim=0.8)
    assert (answer.verdict, answer.reason) == ("do not rely", "the attack works")


def test_few_or_scattered_trials_show_nothing(tmp_path: Path) -> None:
    few = behind(tmp_path / "few", FAILS[:2], privacy=PROVEN)
    assert (few.verdict, few.reason) == ("not shown", "too few trials for an interval")
    wide = behind(tmp_path / "wide", [8.0, 9.0, 14.5, 14.9], privacy=PROVEN)
    assert wide.verdict == "not shown"
    assert wide.gain is not None and wide.gain.high is not None and wide.gain.high >= 3
    assert "so more trials are needed" in wide.reason


def test_a_model_that_learned_nothing_earns_no_reliance(tmp_path: Path) -> None:
    answer = behind(tmp_path, FAILS, privacy=PROVEN, accuracy=0.1)
    assert (answer.verdict, "learned nothing" in answer.reason) == ("not shown", True)


def test_rows_that_are_invalid_never_answer(tmp_path: Path) -> None:
    weak = trials([13.0, 13.1, 13.2], defense="none", ssim=0.9)
    for answer in answered(tmp_path, [*weak, *trials([30.0, 30.1, 30.2], privacy=PROVEN)]):
        assert (answer.verdict, answer.finding) == ("not shown", "no answer")
        assert "nothing can be said: INVALID, for the attacks do not work" in answer.sentence
        assert "dB over guessing, 95%" not in answer.sentence and "ε" not in answer.sentence


def test_labels_are_stated_where_pictures_have_no_answer(tmp_path: Path) -> None:
    weak = trials([12.0, 12.1, 12.2], defense="none", label_accuracy=1.0)
    plain, behind_dp = answered(tmp_path / "failed", [*weak, *trials(FAILS, privacy=PROVEN)])
    assert (plain.verdict, plain.finding) == ("not shown", "no answer")
    assert plain.sentence.startswith(
        "Without a defense, labels are recovered; of pictures nothing can be said: 100% of labels "
        "recovered (guessing: 20%"
    )
    assert "INVALID, for the attacks do not work here, which is no proof" in plain.sentence
    assert plain.brief == f"{plain.lead}: {plain.reason}."
    page = write_report(tmp_path / "failed").read_text(encoding="utf-8")
    assert re.search(r"<dt>Shown by</dt><dd>[^\n]*100%[^\n]* of labels recovered", page)
    assert behind_dp.labels == "" and "labels" not in behind_dp.sentence
    (alone,) = answered(tmp_path / "absent", trials(FAILS, label_accuracy=1.0))
    assert "labels are recovered; of pictures nothing can be said" in alone.sentence
    assert "nothing was attacked without a defense" in alone.sentence


def test_labels_that_guessing_gets_are_none_that_an_attack_recovered(tmp_path: Path) -> None:
    weak = trials([12.0, 12.1, 12.2], defense="none", label_accuracy=0.25)
    (plain,) = answered(tmp_path, weak)
    assert plain.sentence.startswith("Without a defense, nothing can be said: INVALID")


def test_without_an_undefended_stack_nothing_is_answered(tmp_path: Path) -> None:
    (answer,) = answered(tmp_path, trials(FAILS, privacy=PROVEN))
    assert (answer.verdict, answer.finding) == ("not shown", "no answer")
    assert "INVALID, for nothing was attacked without a defense" in answer.sentence


def test_a_run_with_unscored_rows_never_answers(tmp_path: Path) -> None:
    late = trial(None, trial=9) | {"status": "unscored", "reason": "the truth is elsewhere"}
    for answer in answered(tmp_path, [*WORKS, *trials(FAILS, privacy=PROVEN), late]):
        assert (answer.verdict, answer.finding) == ("not shown", "no answer")
        assert "has not ended, or is not scored to its end" in answer.sentence


def test_attacks_that_all_failed_are_no_protection(tmp_path: Path) -> None:
    answer = behind(tmp_path, [None, None, None], privacy=PROVEN)
    assert answer.verdict == "not shown"
    assert "all of 3 attack runs failed, which is no protection" in answer.sentence


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ({"server": "planted"}, "a malicious server that planted weights in the model’s head gets"),
        ({"server": "modified"}, "a malicious server that put a module into the model gets"),
        ({"vantage": "client"}, "another participant gets"),
        ({"vantage": "eavesdropper"}, "an eavesdropper on the wire gets"),
        ({"vantage": "aggregate"}, "the server, which sees sums alone, gets"),
    ],
)
def test_who_attacks_is_named(case: dict[str, Any], named: str, tmp_path: Path) -> None:
    values = [30.0, 31.0, 32.0, 33.0]
    (answer,) = answered(tmp_path, trials(values, defense="none", ssim=0.9, **case))
    assert f"Without a defense, {named} recognizable pictures" in answer.sentence


def test_costs_are_beside_those_without_defense(tmp_path: Path) -> None:
    rounds = [
        {"defense": name, "round": number, "seconds": seconds}
        for name, times in (("none", (1.0, 3.0)), ("dp", (4.0, 6.0)))
        for number, seconds in enumerate(times, start=1)
    ]
    lines = [*WORKS, *trials(FAILS, accuracy=0.8)]
    plain, defended = answered(tmp_path, lines, rounds)
    assert plain.costs.endswith("2 s a round")
    assert "10.0 points below no defense" in defended.costs
    assert defended.costs.endswith("5 s a round instead of 2 s")


def test_labels_leak_where_pictures_do_not(tmp_path: Path) -> None:
    answer = behind(tmp_path, FAILS, privacy=PROVEN, label_accuracy=1.0)
    assert (answer.finding, answer.verdict) == ("labels", "do not rely")
    assert "gets labels: 100% of labels recovered (guessing: 20%)" in answer.sentence


def test_attempts_count_no_attack_that_recovers_features_alone(tmp_path: Path) -> None:
    other = trials(FAILS, attack="dlg")
    features = trials(FAILS, attack="classifier_fit", subspace_error=1.0)
    for row in features:
        del row["metrics"]["psnr"], row["baseline"]["psnr"]
    answer = answered(tmp_path, [*WORKS, *trials(FAILS), *other, *features])[1]
    assert "the best of 2 attempts with 2 attacks" in answer.sentence


def test_the_choice_among_attacks_widens_the_interval(tmp_path: Path) -> None:
    twice = [
        *trials(FAILS, privacy=PROVEN),
        *trials([v - 0.5 for v in FAILS], attack="dlg", privacy=PROVEN),
    ]
    answer = answered(tmp_path, [*WORKS, *twice])[1]
    _, alone = student_interval([v - 12 for v in FAILS])
    assert "the best of 2 attempts with 2 attacks" in answer.sentence
    assert answer.gain is not None and answer.gain.high is not None
    assert answer.gain.high > alone + 0.01
    assert math.isclose(answer.gain.mean, 0.0, abs_tol=1e-9)


def test_what_no_attack_tried_is_said(tmp_path: Path) -> None:
    (plain,) = answered(tmp_path, WORKS)
    assert plain.untried == (
        "labels",
        "who took part (membership)",
        "a server that alters the model",
        "other participants",
    )
    rows = trials([30.0, 31.0, 32.0], defense="none", server="planted", label_accuracy=1.0)
    (planted,) = answered(tmp_path, rows)
    assert planted.untried == ("who took part (membership)", "other participants")


def test_every_comparison_is_answered_by_itself(tmp_path: Path) -> None:
    planted = trials([13.0, 13.1, 13.2], defense="none", server="planted")
    answered(tmp_path, [*WORKS, *planted])
    (honest, first), (malicious, second) = answers_of(load_runs([tmp_path]))
    assert (honest[-2].server, malicious[-2].server) == ("honest", "planted")
    assert [answer.finding for answer in (*first, *second)] == ["recognizable", "no answer"]
    assert first[0].brief == (
        "Without a defense, the server gets recognizable pictures; do not rely on it: the attack "
        "works."
    )
    assert second[0].brief == second[0].sentence


def test_the_terminal_answers_above_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nasty = "dp\x1b[2Jx"
    found = answered(tmp_path, [*WORKS, *trials(FAILS, privacy=PROVEN, defense=nasty)])
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["leaderboard", str(tmp_path)]).stdout
    said, _, _ = re.sub(r"\s+", " ", shown).partition(" defense attack ")
    assert "\x1b" not in shown
    assert f"- {found[0].brief}" in said
    assert f"- {printable(found[1].brief)}" in said
    assert max(map(len, shown.splitlines())) <= 80
