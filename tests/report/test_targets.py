"""Leaks that one target hid behind another, and leaks that were seen where none is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from answer_rows import FAILS, PROVEN, WORKS, answered, trial, trials

from fedsim.report import invalid_reasons, leaderboard_rows
from fedsim.report.answers import Answer

Lines = list[dict[str, Any]]
TRIALS = range(5)


def changed(rows: Lines, **parts: dict[str, Any]) -> Lines:
    """The same trials with more in some of their parts, a little more in each trial."""
    return [
        row
        | {
            name: row.get(name, {})
            | {key: v + i / 1e4 if isinstance(v, float) else v for key, v in part.items()}
            for name, part in parts.items()
        }
        for i, row in enumerate(rows)
    ]


def controlled(rows: Lines, of: str | None, psnr: float | None) -> Lines:
    """The same trials, scored against another update of that kind."""
    other = None if psnr is None else {"psnr": psnr, "label_accuracy": 0.2}
    return [row | {"control": {"of": of, "other_update": other}} for row in rows]


def defended(folder: Path, behind: Lines, plain: Lines = WORKS) -> Answer:
    """The answer for the defense."""
    return next(a for a in answered(folder, [*plain, *behind]) if not a.undefended)


SAFE = trials(FAILS, privacy=PROVEN)
WORKING = trials([30.0, 31.0, 32.0, 33.0, 34.0], defense="none", ssim=0.9)


def stating(rows: Lines, certified: int, false: int | None) -> Lines:
    stated = {"images": 1, "certified": certified, "false": false}
    return [row | {"certificate": stated} for row in rows]


def with_features(rows: Lines, span: float, cosine: float = 0.9) -> Lines:
    return changed(
        rows,
        metrics={"subspace_error": span, "feature_cosine": cosine},
        baseline={"subspace_error": 0.9, "feature_cosine": 0.5},
        control={"other_update": {"psnr": 9.0, "subspace_error": 0.9, "feature_cosine": 0.5}},
    )


def test_exact_features_leak_beside_images_that_do_not(tmp_path: Path) -> None:
    answer = defended(tmp_path, with_features(SAFE, 1e-4))
    assert (answer.finding, answer.verdict) == ("features", "do not rely")
    assert "span error 0.00" in answer.evidence
    assert "reconstructs" not in answer.judgement.sentence


@pytest.mark.parametrize(
    ("certified", "false", "finding"),
    [
        (40, 0, "features"),
        (40, 2, "features"),
        (40, 39, "nothing"),
        (0, None, "nothing"),
        (1, None, "some trials"),
    ],
)
def test_a_certificate_that_holds_is_a_leak(
    certified: int, false: int | None, finding: str, tmp_path: Path
) -> None:
    answer = defended(tmp_path, stating(with_features(SAFE, 0.89), certified, false))
    assert answer.finding == finding


def test_a_certificate_of_what_guesses_reach_is_none(tmp_path: Path) -> None:
    rows = stating(with_features(SAFE, 0.89), 1, 0)
    rows = changed(rows, baseline={"feature_cosine": 0.9999})
    assert defended(tmp_path, rows).finding == "nothing"


def test_a_certificate_of_labels_is_a_leak_of_labels(tmp_path: Path) -> None:
    rows = stating(trials(FAILS, privacy=PROVEN, label_accuracy=1.0), 1, 0)
    rows = controlled(rows, "batch", 9.0)
    rows = [
        row | {"control": {"of": "batch", "other_update": {"label_accuracy": 1.0}}} for row in rows
    ]
    answer = defended(tmp_path, rows)
    assert (answer.finding, answer.verdict) == ("labels", "do not rely")


def test_features_pass_the_control_where_images_fail(tmp_path: Path) -> None:
    plain = with_features(trials(FAILS, defense="none"), 0.01)
    answered(tmp_path, plain)
    assert not invalid_reasons(leaderboard_rows([tmp_path]))


@pytest.mark.parametrize(
    ("of", "finding"),
    [("batch", "undecided"), ("client", "nothing"), ("public", "nothing"), (None, "nothing")],
)
def test_look_alikes_of_one_client_hide_no_leak(
    of: str | None, finding: str, tmp_path: Path
) -> None:
    rows = controlled(trials([28.0, 28.1, 28.2, 27.9, 28.3], privacy=PROVEN), of, 28.4)
    answer = defended(tmp_path, rows)
    assert answer.finding == finding
    assert answer.verdict == "not shown" or finding == "nothing"


def test_a_run_of_look_alikes_is_not_invalid(tmp_path: Path) -> None:
    answered(tmp_path, controlled(WORKING, "batch", 33.0))
    assert not invalid_reasons(leaderboard_rows([tmp_path]))


def test_what_beats_look_alikes_leaks(tmp_path: Path) -> None:
    rows = controlled(trials([28.0, 28.1, 28.2, 27.9, 28.3], ssim=0.9), "batch", 15.0)
    assert defended(tmp_path, rows).finding == "recognizable"


def test_another_batch_confirms_a_leak_and_makes_it_no_less(tmp_path: Path) -> None:
    """Look-alikes of one client are drawn nearly as well, and the pictures are recognizable."""
    leaky = trials([30.0, 30.1, 29.9, 30.2, 30.3], privacy=PROVEN, ssim=0.9)
    answer = defended(tmp_path, controlled(leaky, "batch", 28.5))
    assert (answer.finding, answer.judgement.level) == ("recognizable", "leak")
    assert answer.judgement.leaking and answer.judgement.leaking.count == 5
    weaker = controlled(leaky, "client", 28.5)
    assert defended(tmp_path / "client", weaker).judgement.level == "partial"


@pytest.mark.parametrize(("of", "finding"), [("batch", "some trials"), ("client", "nothing")])
def test_another_batch_refutes_no_single_trial(of: str, finding: str, tmp_path: Path) -> None:
    rows = trials([17.0, *FAILS[1:]], privacy=PROVEN)
    assert defended(tmp_path, controlled(rows, of, 15.5)).finding == finding


def test_labels_of_one_client_are_not_called_guessed(tmp_path: Path) -> None:
    rows = trials(FAILS, privacy=PROVEN, label_accuracy=1.0)
    same = {"control": {"of": "batch", "other_update": {"psnr": 9.0, "label_accuracy": 1.0}}}
    assert defended(tmp_path, [row | same for row in rows]).finding == "some trials"


def test_words_say_what_the_control_is_of(tmp_path: Path) -> None:
    said = set()
    for of in ("client", "public"):
        rows = controlled(trials([28.0, 28.1, 28.2, 27.9, 28.3]), of, 28.4)
        said.add(defended(tmp_path / of, rows).judgement.sentence)
    assert len(said) == 2


def test_chance_is_no_protection(tmp_path: Path) -> None:
    """Where one trial of five succeeds, none of five is to be expected of three in ten."""
    plain = trials([58.0, 12.0, 12.1, 11.9, 12.0], defense="none", ssim=0.9)
    rare = [*plain, *trials([16.0, 16.1, 16.2, 16.1, 16.0], defense="none", attack="dlg")]
    behind = [*SAFE, *trials(FAILS, attack="dlg", privacy=PROVEN)]
    assert defended(tmp_path, behind, rare).verdict == "not shown"


@pytest.mark.parametrize("guess", [13.0, 31.0])
def test_each_image_is_compared_with_its_own_guess(guess: float, tmp_path: Path) -> None:
    rows = SAFE
    for name, value in (("", 32.0), ("baseline", guess), ("control", 12.0)):
        images = {"psnr": [value, *[11.8] * 63]}
        rows = [
            row | ({name: row[name] | {"per_image": images}} if name else {"per_image": images})
            for row in rows
        ]
    answer = defended(tmp_path, rows)
    expected = ("recognizable", "do not rely") if guess < 20 else ("nothing", "rely")
    assert (answer.finding, answer.verdict) == expected


def test_an_image_that_is_drawn_from_any_update_is_no_leak(tmp_path: Path) -> None:
    images = {"psnr": [48.0, *[11.8] * 3]}
    rows = [
        row
        | {"per_image": images}
        | {"baseline": row["baseline"] | {"per_image": {"psnr": [15.0, 11.8, 11.8, 11.8]}}}
        | {"control": row["control"] | {"per_image": images}}
        for row in SAFE
    ]
    assert defended(tmp_path, rows).finding == "nothing"


def test_the_image_of_one_trial_is_not_judged_by_the_gain_of_another(tmp_path: Path) -> None:
    """A prior that draws blank slides: 48 dB in a trial that is 9 dB below its guess."""
    rows = trials([12.1, 3.0, 3.1, 2.9, 3.2], attack="prior")
    rows[1]["per_image"] = {"psnr": [48.0, 0.5]}
    answer = defended(tmp_path, rows)
    assert answer.finding == "nothing"
    assert answer.judgement.level == "unseen"


LIKE = {"ssim": 0.85, "lpips": 0.05}
UNLIKE = {"ssim": 0.1, "lpips": 0.7}


@pytest.mark.parametrize("name", ["ssim", "lpips"])
def test_likeness_counts_whatever_the_pixels(name: str, tmp_path: Path) -> None:
    rows = changed(
        SAFE,
        metrics={name: LIKE[name]},
        baseline={name: UNLIKE[name]},
        control={"other_update": {"psnr": 9.0, name: UNLIKE[name]}},
    )
    answer = defended(tmp_path, rows)
    assert (answer.finding, answer.verdict) == ("recognizable", "do not rely")
    drawn = changed(rows, control={"other_update": {"psnr": 9.0, name: LIKE[name]}})
    assert defended(tmp_path / "drawn", drawn).finding == "nothing"


def test_likeness_in_one_trial_is_not_called_nothing(tmp_path: Path) -> None:
    rows = changed(
        SAFE,
        metrics={"ssim": 0.1},
        baseline={"ssim": 0.1},
        control={"other_update": {"psnr": 9.0, "ssim": 0.1}},
    )
    rows[2]["metrics"]["ssim"] = 0.85
    answer = defended(tmp_path, rows)
    assert (answer.finding, answer.verdict) == ("some trials", "not shown")


def test_undefended_training_that_diverges_works_for_nothing(tmp_path: Path) -> None:
    plain = changed(WORKING, utility={"local_losses": [1.0, 3.0]})
    assert defended(tmp_path, SAFE, plain).verdict == "not shown"


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.15, "not shown"), (0.6, "rely")])
def test_a_model_that_hardly_learns_earns_no_reliance(
    accuracy: float, verdict: str, tmp_path: Path
) -> None:
    rows = trials(FAILS, privacy=PROVEN, accuracy=accuracy)
    assert defended(tmp_path, rows).verdict == verdict


def test_an_attack_that_ignores_the_update_never_works(tmp_path: Path) -> None:
    rows = changed(
        trials([30.0, 41.0, 32.0], defense="none", attack="p", ssim=0.9),
        attack={"ignores_update": True},
    )
    (answer,) = answered(tmp_path, [*rows, *trials(FAILS, defense="none")])
    assert (answer.finding, answer.judgement.level) == ("no answer", "unseen")
    assert not answer.judgement.leaking or not answer.judgement.leaking.count
    (shown,) = [row for row in leaderboard_rows([tmp_path]) if row.attack == "p"]
    assert not shown.strongest and not shown.exposed
    assert invalid_reasons(leaderboard_rows([tmp_path]))


@pytest.mark.parametrize("psnr", [16.0, 48.0])
def test_a_single_trial_without_a_control_does_not_work_for_certain(
    psnr: float, tmp_path: Path
) -> None:
    (answer,) = answered(tmp_path, controlled([trial(psnr, defense="none", ssim=0.9)], None, None))
    assert (answer.finding, answer.judgement.level) == ("undecided", "undecided")
    assert "no control: one trial" in answer.judgement.sentence


def test_a_control_that_gives_as_much_does_not_pass(tmp_path: Path) -> None:
    plain = [trial(17.4 + i / 100, trial=i, defense="none") for i in TRIALS]
    answered(tmp_path, controlled(plain, "client", 17.3))
    (reason,) = invalid_reasons(leaderboard_rows([tmp_path]))
    assert "5.4 dB" in reason and "0.1 dB" in reason


def test_trials_without_a_control_make_no_leak_certain(tmp_path: Path) -> None:
    """One of five is controlled, and shows that the gain is no update's."""
    rows = trials([30.0, 30.1, 30.2, 29.9, 30.3], ssim=0.9)
    rows = [*controlled(rows[:1], "client", 30.0), *controlled(rows[1:], None, None)]
    assert defended(tmp_path, rows).finding == "some trials"
    good = [*controlled(rows[:3], "client", 9.0), *controlled(rows[3:], None, None)]
    assert defended(tmp_path / "good", good).finding == "recognizable"
    (row,) = [row for row in leaderboard_rows([tmp_path / "good"]) if row.defense == "dp"]
    assert row.uncontrolled == 2 and row.own_gain is not None and row.own_gain.n == 3
    assert math.isclose(row.own_gain.max, 18.2)
