"""Cases in which a reader would rely on a defense, or call a leak nothing, for no good reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from answer_rows import FAILS, PROVEN, WORKS, answered, behind, trial, trials

from fedsim.report import load_runs, write_report
from fedsim.report.answers import Answer, answers_of
from fedsim.report.content import Content


def defended(folder: Path, lines: list[dict[str, Any]]) -> Answer:
    """The answer for the defense among `lines`, beside attacks that work without one."""
    return next(a for a in answered(folder, [*WORKS, *lines]) if not a.undefended)


def without_control(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same trials, run on no other update."""
    return [row | {"control": {"other_update": None}} for row in rows]


def test_these_cases_differ_from_one_that_is_relied_on(tmp_path: Path) -> None:
    assert behind(tmp_path, FAILS, privacy=PROVEN).verdict == "rely"


def test_an_audit_may_refute_what_training_claims_below_what_all_releases_do(
    tmp_path: Path,
) -> None:
    audit = {"defense": "dp", "method": "canaries", "audited_epsilon": 1.5, "holds": False}
    answered(tmp_path, [*WORKS, *trials(FAILS, privacy=PROVEN | {"audited_epsilon": 1.5})])
    (tmp_path / "audit.jsonl").write_text(json.dumps(audit) + "\n")
    ((_, found),) = answers_of(load_runs([tmp_path]))
    assert found[1].verdict == "do not rely"
    assert "the audit refutes the ε that its training claims" in found[1].sentence


@pytest.mark.parametrize("values", [[12.1, None, None, None, None], [*FAILS, None]])
def test_a_failure_counts_as_guessing_and_never_as_protection(
    values: list[float | None], tmp_path: Path
) -> None:
    answer = behind(tmp_path, values, privacy=PROVEN)
    assert answer.verdict == "not shown"
    failed = values.count(None)
    assert f"{failed} of {len(values)} attack runs failed, which is no protection" in answer.reason


def test_an_attack_that_guesses_does_not_stand_for_one_that_failed(tmp_path: Path) -> None:
    lines = [
        *trials([12.0, 12.1, 11.9, 12.0], defense="none", attack="dlg"),
        *trials([None, None, None, None, None], privacy=PROVEN),
        *trials(FAILS, attack="dlg", privacy=PROVEN),
    ]
    answer = defended(tmp_path, lines)
    assert answer.verdict == "not shown"
    assert "5 of 10 attack runs failed" in answer.reason


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attack": {"name": "dlg", "label": "dlg"}}, "inverting_gradients at batch size 1"),
        ({"batch_size": 8}, "inverting_gradients at batch size 1"),
        ({"round": 40}, "inverting_gradients at batch size 1"),
    ],
)
def test_what_works_without_a_defense_must_have_been_tried_behind_it(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    lines = [row | change for row in trials(FAILS, privacy=PROVEN)]
    answer = defended(tmp_path, lines)
    assert answer.verdict == "not shown"
    assert f"{named} in round 1 works without a defense and was not tried here" in answer.reason


def test_what_was_tried_with_other_grants_bears_no_reliance(tmp_path: Path) -> None:
    granted = {"knowledge": {"labels": "known", "bn": "none"}}
    answered(tmp_path, [*WORKS, *(row | granted for row in trials(FAILS, privacy=PROVEN))])
    (_, honest), (_, (other,)) = answers_of(load_runs([tmp_path]))
    assert [answer.undefended for answer in honest] == [True]
    assert other.verdict == "not shown"
    assert other.reason == "INVALID, for nothing was attacked without a defense"


def test_attacks_that_work_only_at_times_without_a_defense_bear_no_reliance(
    tmp_path: Path,
) -> None:
    plain = trials([21.0, 12.0, 12.0, 12.0, 19.0], defense="none")
    lines = [*plain, *trials(FAILS, privacy=PROVEN)]
    answer = next(a for a in answered(tmp_path, lines) if not a.undefended)
    assert (answer.verdict, answer.finding) == ("not shown", "nothing")
    assert "works for certain without a defense" in answer.reason


def test_the_interval_of_every_attack_counts(tmp_path: Path) -> None:
    plain = trials([30.0, 31.0, 32.0], defense="none", attack="dlg", ssim=0.9)
    few = trials([11.0, 12.0, 12.9], attack="dlg", privacy=PROVEN)
    answer = defended(tmp_path, [*plain, *trials(FAILS, privacy=PROVEN), *few])
    assert answer.verdict == "not shown"
    assert "so more trials are needed" in answer.reason


def test_equal_trials_are_not_called_few(tmp_path: Path) -> None:
    answer = behind(tmp_path, [12.0] * 5, privacy=PROVEN)
    assert answer.verdict == "not shown"
    assert "too few" not in answer.reason
    assert "all trials gained the same" in answer.reason


def diverging(before: float | str, after: float | str) -> list[dict[str, Any]]:
    rows = trials(FAILS, privacy=PROVEN)
    return [row | {"utility": row["utility"] | {"local_losses": [before, after]}} for row in rows]


@pytest.mark.parametrize("losses", [(1.0, 3.0), (1.0, "inf"), ("inf", "inf")])
def test_updates_of_training_that_diverges_bear_no_reliance(losses: Any, tmp_path: Path) -> None:
    answer = defended(tmp_path, diverging(*losses))
    assert answer.verdict == "not shown"
    assert "diverges in 5 of 5 recordings" in answer.reason


def test_a_run_beside_it_that_is_not_scored_answers_nothing(tmp_path: Path) -> None:
    answered(tmp_path / "a", [*WORKS, *trials(FAILS, privacy=PROVEN)])
    late = trial(None, trial=9) | {"status": "unscored", "reason": "the truth is elsewhere"}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "results.jsonl").write_text(json.dumps(late) + "\n")
    (tmp_path / "b" / "scenario.yaml").write_text("name: s\n")
    ((_, found),) = answers_of(load_runs([tmp_path]))
    assert {answer.finding for answer in found} == {"no answer"}


def test_claims_of_pooled_runs_hold_of_each(tmp_path: Path) -> None:
    claims = [PROVEN, PROVEN | {"epsilon": 1.0, "delta": 1e-2}]
    lines = [trial(value, trial=i, privacy=claims[i % 2]) for i, value in enumerate(FAILS)]
    answer = defended(tmp_path / "delta", lines)
    assert "ε = 2 at δ = 0.01 per client" in answer.guarantee
    assert answer.verdict == "not shown"
    units = [PROVEN, PROVEN | {"unit": "example"}]
    lines = [trial(value, trial=i, privacy=units[i % 2]) for i, value in enumerate(FAILS)]
    assert "ε =" not in defended(tmp_path / "unit", lines).guarantee
    none = [PROVEN, {"epsilon": None}]
    lines = [trial(value, trial=i, privacy=none[i % 2]) for i, value in enumerate(FAILS)]
    answer = defended(tmp_path / "none", lines)
    assert (answer.guarantee, answer.verdict) == ("privacy not accounted", "not shown")


def spans(value: float, **case: Any) -> list[dict[str, Any]]:
    """Trials of an attack that recovers features and no pictures."""
    rows = trials(FAILS, attack="head_features", **case)
    for i, row in enumerate(rows):
        row["metrics"] = {"subspace_error": value + i / 1000}
        row["control"] = {"other_update": {"subspace_error": 0.9}}
    return rows


def test_features_leak_where_pictures_do_not(tmp_path: Path) -> None:
    lines = [
        *spans(0.01, defense="none"),
        *trials(FAILS, privacy=PROVEN),
        *spans(0.01, privacy=PROVEN),
    ]
    answer = defended(tmp_path, lines)
    assert (answer.finding, answer.verdict) == ("features", "do not rely")
    assert "gets features of the pictures: span error 0.01, 95% interval" in answer.sentence


@pytest.mark.parametrize("count", [1, 2])
def test_labels_of_few_trials_are_not_called_nothing(count: int, tmp_path: Path) -> None:
    answer = behind(tmp_path, FAILS[:count], privacy=PROVEN, label_accuracy=1.0)
    assert answer.finding == "some trials"
    assert "100% of labels recovered (guessing: 20%)" in answer.sentence


def test_labels_without_a_control_are_not_called_nothing(tmp_path: Path) -> None:
    rows = without_control(trials(FAILS, privacy=PROVEN, label_accuracy=1.0))
    answer = defended(tmp_path, rows)
    assert (answer.finding, answer.verdict) == ("some trials", "not shown")


def test_labels_that_fit_any_update_are_nothing(tmp_path: Path) -> None:
    rows = trials(FAILS, privacy=PROVEN, label_accuracy=1.0)
    same = {"control": {"other_update": {"psnr": 9.0, "label_accuracy": 1.0}}}
    assert defended(tmp_path, [row | same for row in rows]).finding == "nothing"


def test_members_told_now_and_then_are_not_called_nothing(tmp_path: Path) -> None:
    rows = trials(FAILS, privacy=PROVEN)
    for row, area in zip(rows, [1.0, 0.4, 0.9, 0.3, 1.0], strict=True):
        row["metrics"]["membership_auc"] = area
        row["baseline"]["membership_auc"] = 0.5
        row["control"]["other_update"]["membership_auc"] = 0.5
    answer = defended(tmp_path, rows)
    assert (answer.finding, answer.verdict) == ("some trials", "not shown")
    assert "AUC of 0.72" in answer.sentence


def test_colors_only_is_not_said_where_labels_leak(tmp_path: Path) -> None:
    answer = behind(tmp_path, [13.0, 13.1, 13.2, 13.3], label_accuracy=1.0)
    assert answer.finding == "colors only"
    assert "the server gets colors and labels: " in answer.sentence


def test_one_exact_image_of_many_is_not_hidden_by_the_mean(tmp_path: Path) -> None:
    rows = trials([12.5, 12.1, 11.9, 11.8, 12.0], privacy=PROVEN)
    rows[0]["per_image"] = {"psnr": [58.0, *[11.8] * 63]}
    answer = defended(tmp_path, rows)
    assert (answer.finding, answer.verdict) == ("recognizable", "do not rely")
    assert "recognizable pictures in at least 1 of 5 trials: " in answer.sentence
    assert "the best image at 58.0 dB PSNR" in answer.sentence


def test_an_image_that_guesses_reach_is_no_leak(tmp_path: Path) -> None:
    rows = trials(FAILS, privacy=PROVEN)
    rows[0]["per_image"] = {"psnr": [27.0, 9.0]}
    assert defended(tmp_path, rows).finding == "nothing"


def test_recognizable_trials_are_not_hidden_by_the_mean(tmp_path: Path) -> None:
    rows = trials([21.0, 15.5, 15.6, 15.7, 15.8])
    for row, likeness in zip(rows, [0.9, 0.1, 0.1, 0.1, 0.1], strict=True):
        row["metrics"]["ssim"] = likeness
    answer = defended(tmp_path, rows)
    assert answer.finding == "recognizable"
    assert "recognizable pictures in 1 of 5 trials: " in answer.sentence


def test_a_certain_leak_is_not_hidden_by_a_larger_uncertain_one(tmp_path: Path) -> None:
    larger = trials([21.0, 8.0, 21.0, 8.0, 21.0], privacy=PROVEN, ssim=0.1)
    lines = [
        *[row | {"control": {"other_update": {"psnr": 2.0}}} for row in larger],
        *trials([15.4, 15.5, 15.6, 15.7], attack="dlg", privacy=PROVEN, ssim=0.9),
    ]
    answer = defended(tmp_path, lines)
    assert (answer.finding, answer.verdict) == ("recognizable", "do not rely")


def test_of_a_secure_sum_the_answer_is_of_the_sum(tmp_path: Path) -> None:
    lines = [
        *trials([v + 0.1 for v in FAILS], privacy=PROVEN),
        *trials(FAILS, vantage="aggregate", privacy=PROVEN),
    ]
    answer = defended(tmp_path, lines)
    assert answer.attacker == "the server, which sees sums alone,"
    broken = [*trials([30.0, 31.0, 32.0], privacy=PROVEN, ssim=0.9), *lines[5:]]
    answer = defended(tmp_path / "broken", broken)
    assert (answer.attacker, answer.finding) == (
        "the server, which sees masked updates,",
        "recognizable",
    )


def test_the_trials_of_labels_are_those_of_their_attack(tmp_path: Path) -> None:
    labels = trials([12.0] * 3, attack="idlg", label_accuracy=1.0)
    for row in labels:
        row["metrics"] = {"label_accuracy": 1.0}
        row["control"] = {"other_update": {"label_accuracy": 0.2}}
    answer = defended(tmp_path, [*trials(FAILS), *labels])
    assert answer.finding == "labels"
    assert "by idlg, batch size 1, n = 3 trials, +0.0 dB over guessing" in answer.sentence
    assert "by inverting_gradients at batch size 1, n = 5 trials" in answer.sentence


def test_an_attack_on_labels_alone_is_not_called_none(tmp_path: Path) -> None:
    plain = trials([12.0] * 4, defense="none", attack="idlg", label_accuracy=1.0)
    labels = trials([12.0] * 4, attack="idlg", privacy=PROVEN)
    for row in [*plain, *labels]:
        row["metrics"] = {"label_accuracy": 1.0 if row in plain else 0.2}
    answer = defended(tmp_path, [*plain, *labels])
    assert answer.verdict == "not shown"
    assert "no attack was measured" not in answer.sentence
    assert "no attack on images ran" in answer.sentence


def test_what_was_not_tried_names_batches_and_rounds(tmp_path: Path) -> None:
    rounds = [{"defense": "none", "round": number} for number in (1, 2, 3)]
    lines = [row | {"batch_size": 8} for row in WORKS]
    (answer,) = answered(tmp_path, lines, rounds)
    assert "batches of fewer than 8 images" in answer.untried
    assert "rounds other than 1" in answer.untried
    (answer,) = answered(tmp_path / "all", WORKS, rounds[:1])
    assert not any("batches" in kind or "rounds" in kind for kind in answer.untried)


def test_long_rounds_are_in_plain_numbers(tmp_path: Path) -> None:
    rounds = [{"defense": name, "round": 1, "seconds": 123.4} for name in ("none", "dp")]
    plain, defended = answered(tmp_path, [*WORKS, *trials(FAILS)], rounds)
    assert plain.costs.endswith("123 s a round")
    assert defended.costs.endswith("123 s a round, as without defense")


def test_nothing_is_said_for_certain_only_of_an_interval_without_a_leak(tmp_path: Path) -> None:
    wide = behind(tmp_path / "wide", [13.0, 14.9, 11.0], privacy=PROVEN)
    assert "gets nothing certain beyond the guess" in wide.sentence
    one = behind(tmp_path / "one", [14.9], privacy=PROVEN)
    assert one.finding == "nothing"
    assert "gets nothing certain beyond the guess" in one.sentence
    assert "gets nothing beyond the guess" in behind(tmp_path / "narrow", FAILS).sentence


def test_a_loss_to_guessing_is_not_called_due_to_the_update(tmp_path: Path) -> None:
    answer = behind(tmp_path, [2.0, 2.1, 2.2, 2.3], privacy=PROVEN)
    assert "−9.8 dB over guessing and another update" in answer.sentence


def test_a_model_that_nobody_tested_earns_no_reliance(tmp_path: Path) -> None:
    rows = [row | {"utility": None} for row in trials(FAILS, privacy=PROVEN)]
    answer = defended(tmp_path, rows)
    assert (answer.verdict, answer.reason) == (
        "not shown",
        "whether the model learned was not measured",
    )


def test_the_sentence_of_attacks_that_all_failed_is_one(tmp_path: Path) -> None:
    assert behind(tmp_path, [None, None, None]).lead == (
        "Behind dp, what the server gets was not measured, for all of 3 attack runs failed, which "
        "is no protection"
    )


def test_a_name_turns_no_words_of_the_page(tmp_path: Path) -> None:
    answered(tmp_path, [*WORKS, *trials(FAILS, privacy=PROVEN, defense="x\u202ey\u2066")])
    page = write_report(tmp_path).read_text()
    assert "Behind x" in page
    assert "\u202e" not in page and "\u2066" not in page


def test_a_model_without_defense_that_learned_nothing_is_no_measure_of_costs(
    tmp_path: Path,
) -> None:
    plain = trials([30.0, 31.0, 32.0], defense="none", ssim=0.9, accuracy=0.1)
    costs = answered(tmp_path, [*plain, *trials(FAILS)])[1].costs
    assert "points above" not in costs and "the same as without defense" not in costs
    assert "the model without defense learned nothing" in costs


def test_an_audit_refutes_the_claim_of_its_own_variant_alone(tmp_path: Path) -> None:
    lines = [*WORKS, *trials(FAILS, privacy=PROVEN)]
    for rate in (0.1, 0.2):
        variant = {"training.local.lr": rate}
        answered(tmp_path / f"{rate}", [row | {"variant": variant} for row in lines])
    audit = {"defense": "dp", "method": "canaries", "audited_epsilon": 1.5, "holds": False}
    (tmp_path / "0.1" / "audit.jsonl").write_text(json.dumps(audit) + "\n")
    runs = load_runs([tmp_path])
    assert [found[1].verdict for _, found in answers_of(runs)] == ["do not rely", "rely"]
    content = Content(runs)
    shown = [row.answer for section in content.sections for row in section.defenses]
    assert [answer.verdict for answer in shown if not answer.undefended] == ["do not rely", "rely"]
