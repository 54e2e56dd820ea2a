"""What follows from figures that are known: each rule of judging, as enumerations and numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from answer_rows import (
    FAILS,
    PROVEN,
    SAFE,
    WORKS,
    Lines,
    behind,
    changed,
    controlled,
    judged,
    trial,
    trials,
)

from fedsim.report import invalid_reasons, leaderboard_rows, load_runs
from fedsim.report.content import Content
from fedsim.report.judge import is_leak
from fedsim.scoring import student_interval

OTHER = {"psnr": 9.0, "label_accuracy": 0.2}
STEADY = [28.0, 28.1, 28.2, 27.9, 28.3]
LEAKY = [18.0, 18.1, 18.2, 18.3, 18.4]


def stating(rows: Lines, certified: int, false: int | None) -> Lines:
    return changed(rows, certificate={"images": 1, "certified": certified, "false": false})


def with_features(rows: Lines, span: float, guessed: float = 0.5) -> Lines:
    """The same trials with features of which a guess leaves a span error of 0.9."""
    return changed(
        rows,
        metrics={"subspace_error": span, "feature_cosine": 0.9},
        baseline={"subspace_error": 0.9, "feature_cosine": guessed},
        control={"other_update": {"psnr": 9.0, "subspace_error": 0.9, "feature_cosine": 0.5}},
    )


def of_features(span: float, **case: Any) -> Lines:
    rows = trials(FAILS, attack="head_features", **case)
    return [
        row
        | {
            "metrics": {"subspace_error": span + i / 1000},
            "control": {"other_update": {"subspace_error": 0.9}},
        }
        for i, row in enumerate(rows)
    ]


def of_images(own: list[float], guess: list[float], other: list[float]) -> Lines:
    """Trials of which each image has a PSNR, as have its guess and that of another update."""
    return [
        row
        | {"per_image": {"psnr": own}}
        | {"baseline": row["baseline"] | {"per_image": {"psnr": guess}}}
        | {"control": row["control"] | {"per_image": {"psnr": other}}}
        for row in SAFE
    ]


def of_likeness(name: str, own: float, guess: float, other: float) -> Lines:
    """Trials whose pictures have that likeness, at pixels that are guessed."""
    return changed(
        SAFE,
        metrics={name: own},
        baseline={name: guess},
        control={"other_update": {"psnr": 9.0, name: other}},
    )


def in_one(rows: Lines, number: int, **parts: dict[str, Any]) -> Lines:
    rows = list(rows)
    rows[number] = rows[number] | {k: rows[number].get(k, {}) | v for k, v in parts.items()}
    return rows


LABELS = trials(FAILS, privacy=PROVEN, label_accuracy=1.0)
AREA = ("membership_auc", "membership_auc_beyond_chance")
MEMBERS = changed(SAFE, baseline={"membership_auc": 0.5})

FINDINGS: dict[str, tuple[Lines, str]] = {
    "SSIM of 0.5 is recognizable": (trials(LEAKY, ssim=0.5), "recognizable"),
    "less is colors": (trials(LEAKY, ssim=0.49), "colors only"),
    "a HaarPSI that denies it": (trials(LEAKY, ssim=0.9, haarpsi=0.49), "colors only"),
    "one that agrees": (trials(LEAKY, ssim=0.5, haarpsi=0.5), "recognizable"),
    "that of noise alone": (trials(LEAKY, ssim=0.1, haarpsi=0.9), "colors only"),
    "that and no gain": (trials(FAILS, ssim=0.1, haarpsi=0.9), "nothing"),
    "a denied likeness stays a leak": (
        [in_one([r], 0, metrics={"haarpsi": 0.1})[0] for r in of_likeness("ssim", 0.85, 0.1, 0.1)],
        "colors only"),
    "a small gain is colors": (trials([13.0, 13.1, 13.2, 13.3], ssim=0.9), "colors only"),
    "no gain is nothing, however alike": (trials(FAILS, ssim=0.9), "nothing"),
    "one trial of 18 dB": (trials([30.0, 12.0, 12.0, 12.0, 12.1], ssim=0.1), "recognizable"),
    "one trial of 5 dB": (trials([17.0, 11.9, 11.9, 11.9, 11.9], ssim=0.1), "some trials"),
    "without SSIM 20 dB are recognizable": (trials([20.0, 20.1, 20.2]), "recognizable"),
    "and less is colors": (trials([19.7, 19.8, 19.9]), "colors only"),
    "labels where pictures do not leak": (LABELS, "labels"),
    "labels of two trials": (LABELS[:2], "some trials"),
    "labels without a control": (controlled(LABELS, None), "some trials"),
    "labels of the same client": (
        controlled(LABELS, "batch", psnr=9.0, label_accuracy=1.0), "some trials"),
    "a certificate of labels": (
        controlled(stating(LABELS, 1, 0), "batch", label_accuracy=1.0), "labels"),
    "members now and then": (
        [
            in_one([row], 0, metrics={"membership_auc": area})[0]
            | {"control": {"other_update": OTHER | {"membership_auc": 0.5}}}
            for row, area in zip(MEMBERS, [1.0, 0.4, 0.9, 0.3, 1.0], strict=True)
        ],
        "some trials",
    ),
    **{
        f"members of one trial, {text}": (
            [
                in_one(MEMBERS[:1], 0, metrics=dict(zip(AREA, (area, low), strict=True)))[0]
                | {"control": {"other_update": OTHER | {"membership_auc": 0.5}}}
            ],
            finding,
        )
        for text, area, low, finding in [
            ("many candidates", 0.7, 0.65, "membership"),
            ("few of them", 0.7, 0.45, "some trials"),
        ]
    },
    "exact features beside images that are none": (with_features(SAFE, 1e-4), "features"),
    "a certificate that holds": (stating(with_features(SAFE, 0.89), 40, 0), "features"),
    "one of twenty is false": (stating(with_features(SAFE, 0.89), 40, 2), "features"),
    "most are false": (stating(with_features(SAFE, 0.89), 40, 39), "nothing"),
    "none is certified": (stating(with_features(SAFE, 0.89), 0, None), "nothing"),
    "one that nobody compared": (stating(with_features(SAFE, 0.89), 1, None), "some trials"),
    "one of what guesses reach": (stating(with_features(SAFE, 0.89, 0.9999), 1, 0), "nothing"),
    "look-alikes of one client": (controlled(trials(STEADY), "batch", psnr=28.4), "undecided"),
    "of another": (controlled(trials(STEADY), "client", psnr=28.4), "nothing"),
    "of public images": (controlled(trials(STEADY), "public", psnr=28.4), "nothing"),
    "of an old row": (controlled(trials(STEADY), None, psnr=28.4), "nothing"),
    "better than look-alikes": (
        controlled(trials(STEADY, ssim=0.9), "batch", psnr=15.0), "recognizable"),
    "a trial that another batch gives, too": (
        controlled(trials([17.0, *FAILS[1:]]), "batch", psnr=15.5), "some trials"),
    "that another client's gives": (
        controlled(trials([17.0, *FAILS[1:]]), "client", psnr=15.5), "nothing"),
    "one exact image of 64": (
        in_one(trials([12.5, *FAILS[1:]]), 0, per_image={"psnr": [58.0, *[11.8] * 63]}),
        "recognizable"),
    "an image 15 dB above its own guess": (
        of_images([32.0, *[11.8] * 63], [13.0, *[11.8] * 63], [12.0, *[11.8] * 63]),
        "recognizable"),
    "as good as its own guess": (
        of_images([32.0, *[11.8] * 63], [31.0, *[11.8] * 63], [12.0, *[11.8] * 63]), "nothing"),
    "drawn from any update": (
        of_images([48.0, *[11.8] * 3], [15.0, *[11.8] * 3], [48.0, *[11.8] * 3]), "nothing"),
    "of 15 dB at a guess of 12": (in_one(SAFE, 0, per_image={"psnr": [27.0, 9.0]}), "nothing"),
    "in a trial below its guess": (
        in_one(trials([12.1, 3.0, 3.1, 2.9, 3.2]), 1, per_image={"psnr": [48.0, 0.5]}), "nothing"),
    "structure whatever the pixels": (of_likeness("ssim", 0.85, 0.1, 0.1), "recognizable"),
    "that another update has": (of_likeness("ssim", 0.85, 0.1, 0.85), "nothing"),
    "likeness whatever the pixels": (of_likeness("lpips", 0.05, 0.7, 0.7), "recognizable"),
    "that another has": (of_likeness("lpips", 0.05, 0.7, 0.05), "nothing"),
    "structure in one trial": (
        in_one(of_likeness("ssim", 0.1, 0.1, 0.1), 2, metrics={"ssim": 0.85}), "some trials"),
    "recognizable trials below the mean": (
        [in_one([r], 0, metrics={"ssim": s})[0] for r, s in
         zip(trials([21.0, 15.5, 15.6, 15.7, 15.8]), [0.9, 0.1, 0.1, 0.1, 0.1], strict=True)],
        "recognizable",
    ),
    "a certain leak beside a larger uncertain one": (
        [
            *controlled(trials([21.0, 8.0, 21.0, 8.0, 21.0], ssim=0.1), None, psnr=2.0),
            *trials([15.4, 15.5, 15.6, 15.7], attack="dlg", ssim=0.9),
        ],
        "recognizable",
    ),
    "features of an attack beside": ([*trials(FAILS), *of_features(0.01)], "features"),
    "one controlled trial of five shows none": (
        [
            *controlled(trials([30.0], ssim=0.9), "client", psnr=30.0),
            *controlled(trials([0.0, 30.1, 30.2, 29.9, 30.3], ssim=0.9)[1:], None),
        ],
        "some trials",
    ),
    "every attack failed": (trials([None, None, None]), "failed"),
}  # fmt: skip


@pytest.mark.parametrize("case", FINDINGS)
def test_what_an_attacker_gets(case: str, tmp_path: Path) -> None:
    lines, finding = FINDINGS[case]
    verdict = behind(tmp_path, lines)
    assert verdict.finding == finding
    if is_leak(finding):
        assert verdict.reliance == "do not rely"
    elif finding != "nothing":
        assert verdict.reliance == "not shown"


AUDITED = {"audited_epsilon": 2.1}
DIVERGING = {"local_losses": [1.0, 3.0]}
PLAIN_DLG = trials([12.0, 12.1, 11.9, 12.0], defense="none", attack="dlg")
PLANS: dict[str, tuple[Lines, Lines, str]] = {
    # Case -> rows without a defense and behind it, and why it is relied on or not.
    "all is well": (WORKS, SAFE, "promised"),
    "an ε below 10": (WORKS, changed(SAFE, privacy={"epsilon": 9.9}), "promised"),
    "an audit below ε": (WORKS, changed(SAFE, privacy={"audited_epsilon": 1.9}), "promised"),
    "ε is infinite": (WORKS, trials(FAILS), "no guarantee"),
    "ε was not accounted": (WORKS, trials(FAILS, privacy={"epsilon": None}), "no guarantee"),
    "ε of 10": (WORKS, trials(FAILS, privacy=PROVEN | {"epsilon": 10.0}), "weak epsilon"),
    "δ of 0.002": (WORKS, trials(FAILS, privacy=PROVEN | {"delta": 0.002}), "large delta"),
    "no δ": (WORKS, trials(FAILS, privacy=PROVEN | {"delta": None}), "terms unstated"),
    "no unit": (WORKS, trials(FAILS, privacy=PROVEN | {"unit": None}), "terms unstated"),
    "no relation": (WORKS, trials(FAILS, privacy=PROVEN | {"relation": None}), "terms unstated"),
    "close": (WORKS, changed(SAFE, privacy={"relation": "close"}), "no differential privacy"),
    "relative": (WORKS, changed(SAFE, privacy={"relation": "relative"}), "no differential privacy"),
    "an audit above ε": (WORKS, trials(FAILS, privacy=PROVEN | AUDITED), "audit refutes"),
    "proven, and it leaks": (WORKS, trials(LEAKY, privacy=PROVEN, ssim=0.8), "attack works"),
    "two trials": (WORKS, SAFE[:2], "few trials"),
    "equal trials": (WORKS, trials([12.0] * 5, privacy=PROVEN), "equal trials"),
    "scattered trials": (WORKS, trials([8.0, 9.0, 14.5, 14.9], privacy=PROVEN), "interval reaches"),
    "the scatter of any attack": (
        [*WORKS, *trials([30.0, 31.0, 32.0], defense="none", attack="dlg", ssim=0.9)],
        [*SAFE, *trials([11.0, 12.0, 12.9], attack="dlg", privacy=PROVEN)], "interval reaches"),
    "one attack run failed": (WORKS, trials([*FAILS, None], privacy=PROVEN), "some failed"),
    "all but one failed": (
        WORKS, trials([12.1, None, None, None, None], privacy=PROVEN), "some failed"),
    "all failed": (WORKS, trials([None, None, None], privacy=PROVEN), "all failed"),
    "another attack for one that failed": (
        [*WORKS, *PLAIN_DLG],
        [*trials([None] * 5, privacy=PROVEN), *trials(FAILS, attack="dlg", privacy=PROVEN)],
        "some failed"),
    "another attack": (WORKS, trials(FAILS, attack="dlg", privacy=PROVEN), "not tried"),
    "another batch size": (WORKS, changed(SAFE, batch_size=8), "not tried"),
    "another round": (WORKS, changed(SAFE, round=40), "not tried"),
    "nothing works for certain without": (
        trials([21.0, 12.0, 12.0, 12.0, 19.0], defense="none"), SAFE, "nothing works"),
    "one of five works without, none of five behind": (
        [
            *trials([58.0, 12.0, 12.1, 11.9, 12.0], defense="none", ssim=0.9),
            *trials([16.0, 16.1, 16.2, 16.1, 16.0], defense="none", attack="dlg"),
        ],
        [*SAFE, *trials(FAILS, attack="dlg", privacy=PROVEN)],
        "not told apart",
    ),
    "without, training diverges": (changed(WORKS, utility=DIVERGING), SAFE, "nothing works"),
    "training diverges": (WORKS, changed(SAFE, utility=DIVERGING), "diverges"),
    "to infinity": (WORKS, changed(SAFE, utility={"local_losses": [1.0, "inf"]}), "diverges"),
    "from infinity": (WORKS, changed(SAFE, utility={"local_losses": ["inf", "inf"]}), "diverges"),
    "the model is at chance": (
        WORKS, trials(FAILS, privacy=PROVEN, accuracy=0.1), "learned nothing"),
    "it learns a sixteenth": (WORKS, trials(FAILS, privacy=PROVEN, accuracy=0.15), "learns little"),
    "it learns half": (WORKS, trials(FAILS, privacy=PROVEN, accuracy=0.6), "promised"),
    "nobody tested it": (WORKS, [row | {"utility": None} for row in SAFE], "not tested"),
    "without, 12% at a chance of 10%": (
        changed(WORKS, utility={"test_accuracy": 0.12}),
        trials(FAILS, privacy=PROVEN, accuracy=0.13), "undefended learned nothing"),
    "without, for certain a tenth of the way": (
        changed(WORKS, utility={"test_accuracy": 0.23}),
        trials(FAILS, privacy=PROVEN, accuracy=0.23), "promised"),
    "nobody tested the undefended": (
        [row | {"utility": None} for row in WORKS], SAFE, "undefended learned nothing"),
    "labels on average": (WORKS, controlled(LABELS, None), "more than guessed"),
    "without a control": (WORKS, controlled(trials(STEADY, privacy=PROVEN), None), "uncontrolled"),
    "only labels were tried": (
        [
            row | {"metrics": {"label_accuracy": 1.0}}
            for row in trials([12.0] * 4, defense="none", attack="idlg")
        ],
        [row | {"metrics": {"label_accuracy": 0.2}} for row in
         trials([12.0] * 4, attack="idlg", privacy=PROVEN)],
        "attacks fail",
    ),
    "a claim's weakest δ of pooled runs": (
        WORKS,
        [r | {"privacy": PROVEN | ({"epsilon": 1.0, "delta": 1e-2} if i % 2 else {})}
         for i, r in enumerate(SAFE)],
        "large delta",
    ),
    "claims of two units": (
        WORKS,
        [r | {"privacy": PROVEN | ({"unit": "example"} if i % 2 else {})}
         for i, r in enumerate(SAFE)],
        "terms unstated",
    ),
    "one run was not accounted": (
        WORKS,
        [r | {"privacy": {"epsilon": None} if i % 2 else PROVEN} for i, r in enumerate(SAFE)],
        "no guarantee"),
    "attacks do not work without": (
        trials([13.0, 13.1, 13.2], defense="none", ssim=0.9),
        trials([30.0, 30.1, 30.2], privacy=PROVEN), "attacks fail"),
    "nothing undefended": ([], SAFE, "nothing undefended"),
    "not scored to its end": (
        WORKS,
        [*SAFE, trial(None, trial=9) | {"status": "unscored", "reason": "truth is elsewhere"}],
        "not ended"),
}  # fmt: skip
RELIES = {"promised": "rely", "attack works": "do not rely", "audit refutes": "do not rely"}


@pytest.mark.parametrize("case", PLANS)
def test_only_a_guarantee_that_no_attack_contradicts_is_relied_on(
    case: str, tmp_path: Path
) -> None:
    plain, lines, kind = PLANS[case]
    verdict = behind(tmp_path, lines, plain)
    assert verdict.reason.kind == kind
    assert verdict.reliance == RELIES.get(kind, "not shown")
    invalid = kind in ("attacks fail", "nothing undefended", "not ended")
    assert (verdict.finding == "no answer") == invalid


def test_an_audit_refutes_what_training_claims_of_its_own_variant(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        variant = {"training.local.lr": rate}
        judged(tmp_path / f"{rate}", [row | {"variant": variant} for row in [*WORKS, *SAFE]])
    audit = {"defense": "dp", "method": "canaries", "audited_epsilon": 1.5, "holds": False}
    (tmp_path / "0.1" / "audit.jsonl").write_text(json.dumps(audit) + "\n")
    kinds = [each.verdicts[1].reason.kind for each in Content(load_runs([tmp_path])).judgements]
    assert kinds == ["training audit refutes", "promised"]


def test_a_run_beside_it_that_is_not_scored_answers_nothing(tmp_path: Path) -> None:
    judged(tmp_path / "a", [*WORKS, *SAFE])
    late = trial(None, trial=9) | {"status": "unscored", "reason": "the truth is elsewhere"}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "results.jsonl").write_text(json.dumps(late) + "\n")
    (tmp_path / "b" / "scenario.yaml").write_text("name: s\n")
    (each,) = Content(load_runs([tmp_path])).judgements
    assert {verdict.finding for verdict in each.verdicts} == {"no answer"}


@pytest.mark.parametrize(("told", "stand"), [(1.0, True), (0.25, False)])
def test_labels_stand_where_pictures_have_no_answer(
    told: float, stand: bool, tmp_path: Path
) -> None:
    rows = trials([12.0, 12.1, 12.2], defense="none", label_accuracy=told)
    verdict = judged(tmp_path, rows).verdicts[0]
    assert (verdict.finding, verdict.reliance) == ("no answer", "not shown")
    assert verdict.labels_stand is stand


def test_times_are_of_trials_with_recognizable_pictures(tmp_path: Path) -> None:
    each = behind(
        tmp_path / "each",
        [
            *trials([17.5, 18.8, 20.1], ssim=0.9),
            *trials([12.0, 12.1, 12.2], attack="idlg", ssim=0.1),
        ],
    )
    assert each.level == "partial" and each.times
    assert (each.times.count, each.times.n, each.times.or_more) == (3, 3, False)
    assert each.leaking and each.leaking.low == pytest.approx(0.23, abs=0.005)
    image = behind(tmp_path / "image", FINDINGS["one exact image of 64"][0])
    assert image.times and (image.times.count, image.times.n, image.times.or_more) == (1, 5, True)
    assert image.exposed_image == 58.0
    one = behind(tmp_path / "one", FINDINGS["recognizable trials below the mean"][0])
    assert one.times and (one.times.count, one.times.n) == (1, 5)
    assert behind(tmp_path / "mean", trials(LEAKY, ssim=0.9)).times is None
    wide = behind(tmp_path / "wide", trials([15.1, 15.2, 21.5], ssim=0.1))
    assert (wide.finding, wide.leaking and wide.leaking.count) == ("some trials", 3)


def test_the_choice_among_attacks_widens_the_interval(tmp_path: Path) -> None:
    features = changed(trials(FAILS, attack="classifier_fit"), baseline={"psnr": None})
    features = [row | {"metrics": {"subspace_error": 1.0}} for row in features]
    lines = [*SAFE, *trials([v - 0.5 for v in FAILS], attack="dlg", privacy=PROVEN), *features]
    verdict = behind(tmp_path, lines)
    assert verdict.attacks == 2, "an attack on features alone is none of those"
    assert verdict.gain and verdict.gain.compared == 2
    assert (verdict.gain.high or 0) > student_interval([v - 12 for v in FAILS])[1] + 0.01


def test_trials_without_a_control_make_no_leak_certain(tmp_path: Path) -> None:
    rows = trials([30.0, 30.1, 30.2, 29.9, 30.3], ssim=0.9)
    good = [*controlled(rows[:3], "client", psnr=9.0), *controlled(rows[3:], None)]
    row = behind(tmp_path, good).strongest
    assert row.uncontrolled == 2 and row.own_gain is not None and row.own_gain.n == 3
    assert math.isclose(row.own_gain.max, 18.2)


@pytest.mark.parametrize(
    ("values", "bounded"), [(FAILS, True), ([13.0, 14.9, 11.0], False), ([14.9], False)]
)
def test_nothing_is_certain_only_of_an_interval_without_a_leak(
    values: list[float], bounded: bool, tmp_path: Path
) -> None:
    verdict = behind(tmp_path, trials(values, privacy=PROVEN))
    assert (verdict.finding, verdict.is_bounded) == ("nothing", bounded)


def test_every_comparison_is_judged_by_itself_and_what_leaks_besides_is_named(
    tmp_path: Path,
) -> None:
    planted = trials([13.0, 13.1, 13.2], defense="none", server="planted")
    granted = changed(SAFE, knowledge={"labels": "known"})
    colors = trials([13.0, 13.1, 13.2, 13.3], label_accuracy=1.0)
    judged(tmp_path, [*WORKS, *colors, *planted, *granted])
    honest, known, malicious = Content(load_runs([tmp_path])).judgements
    found = [(each.comparison[-2].server, each.verdicts[0].finding) for each in (honest, malicious)]
    assert found == [("honest", "recognizable"), ("planted", "no answer")]
    assert known.verdicts[0].reason.kind == "nothing undefended"
    assert (honest.verdicts[1].finding, honest.verdicts[1].besides) == ("colors only", ("labels",))


def test_another_batch_confirms_a_leak_and_makes_it_no_less(tmp_path: Path) -> None:
    """Look-alikes of one client are drawn nearly as well, and the pictures are recognizable."""
    leaky = trials([30.0, 30.1, 29.9, 30.2, 30.3], ssim=0.9)
    verdict = behind(tmp_path, controlled(leaky, "batch", psnr=28.5))
    assert (verdict.finding, verdict.level) == ("recognizable", "leak")
    assert verdict.leaking and verdict.leaking.count == 5
    weaker = behind(tmp_path / "client", controlled(leaky, "client", psnr=28.5))
    assert weaker.level == "partial"


def test_of_a_secure_sum_the_verdict_is_of_the_sum(tmp_path: Path) -> None:
    masked = trials([v + 0.1 for v in FAILS], privacy=PROVEN)
    summed = trials(FAILS, vantage="aggregate", privacy=PROVEN)
    assert behind(tmp_path, [*masked, *summed]).strongest.vantage == "aggregate"
    broken = [*trials([30.0, 31.0, 32.0], privacy=PROVEN, ssim=0.9), *summed]
    verdict = behind(tmp_path / "broken", broken)
    assert (verdict.strongest.masked, verdict.finding) == (True, "recognizable")


def test_what_no_attack_tried_is_listed(tmp_path: Path) -> None:
    def kinds(folder: str, *args: Any) -> set[str]:
        untried = judged(tmp_path / folder, *args).untried
        return {each.kind.removeprefix("untried ") for each in untried}

    plain = {"labels", "membership", "malicious server", "participants"}
    assert kinds("plain", WORKS) == plain
    planted = trials([30.0, 31.0, 32.0], defense="none", server="planted", label_accuracy=1.0)
    assert kinds("planted", planted) == {"membership", "participants"}
    assert kinds("blind", changed(WORKS, attack={"blind": True})) == plain | {"knowledge"}
    rounds = [{"defense": "none", "round": number} for number in (1, 2, 3)]
    large = changed(WORKS, batch_size=8)
    assert kinds("rounds", large, rounds) == plain | {"smaller batches", "rounds"}


def test_costs_are_beside_those_without_a_defense(tmp_path: Path) -> None:
    rounds = [
        {"defense": name, "round": number, "seconds": seconds}
        for name, times in (("none", (1.0, 3.0)), ("dp", (4.0, 6.0)))
        for number, seconds in enumerate(times, start=1)
    ]
    lines = trials(FAILS, accuracy=0.8)
    plain, costs = (v.costs for v in judged(tmp_path, [*WORKS, *lines], rounds).verdicts)
    assert (plain.seconds, plain.usual_seconds, plain.points) == (2.0, None, None)
    assert (costs.seconds, costs.usual_seconds, costs.is_apart) == (5.0, 2.0, True)
    assert costs.points == pytest.approx(-10.0)
    at_chance = trials([30.0, 31.0, 32.0], defense="none", ssim=0.9, accuracy=0.1)
    costs = behind(tmp_path / "chance", lines, at_chance).costs
    assert (costs.points, costs.is_measured) == (None, False)


CAUTIONS: dict[str, tuple[Lines, list[str]]] = {
    "none": (SAFE, []),
    "few trials": (SAFE[:2], ["few trials"]),
    "trials of one image": (changed(SAFE, victims=["one image"]), ["shared images"]),
    "equal trials": (trials([12.0] * 5), ["equal trials"]),
    "a failure": (trials([*FAILS, None]), ["some failed"]),
    "training that diverges": (changed(SAFE, utility=DIVERGING), ["diverges"]),
    "as much from another update": (
        controlled(trials(STEADY), "client", psnr=28.4),
        ["control as good"],
    ),
    "an ε of 70333": (trials(FAILS, privacy=PROVEN | {"epsilon": 70333.0}), ["weak epsilon"]),
    "an audit": (trials(FAILS, privacy=PROVEN | AUDITED), ["audit refutes"]),
}


@pytest.mark.parametrize("case", CAUTIONS)
def test_what_to_know_before_a_verdict_is_believed(case: str, tmp_path: Path) -> None:
    lines, kinds = CAUTIONS[case]
    assert [caution.kind for caution in behind(tmp_path, lines).cautions] == kinds


def test_labels_that_were_granted_are_no_leak(tmp_path: Path) -> None:
    granted = [changed(rows, knowledge={"labels": "known"}) for rows in (LABELS, WORKS)]
    verdict = behind(tmp_path, *granted)
    assert (verdict.level, verdict.finding) == ("unseen", "nothing")
    assert "labels" not in verdict.told


def test_an_attack_that_ignores_the_update_never_works(tmp_path: Path) -> None:
    rows = changed(
        trials([30.0, 41.0, 32.0], defense="none", attack="p", ssim=0.9),
        attack={"ignores_update": True},
    )
    (verdict,) = judged(tmp_path, [*rows, *trials(FAILS, defense="none")]).verdicts
    assert (verdict.finding, verdict.level) == ("no answer", "unseen")
    assert not verdict.leaking or not verdict.leaking.count
    (shown,) = [row for row in leaderboard_rows([tmp_path]) if row.attack == "p"]
    assert not shown.strongest and not shown.exposed


CONTROLS: dict[str, tuple[Lines, str, str]] = {
    "features where images fail": (
        with_features(trials(FAILS, defense="none"), 0.01), "passed", "subspace_error"),
    "look-alikes of one client": (controlled(WORKS, "batch", psnr=33.0), "passed", "psnr"),
    "as much from another update": (
        controlled([trial(17.4 + i / 100, trial=i, defense="none") for i in range(5)],
                   "client", psnr=17.3), "failed", "psnr",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTROLS)
def test_a_positive_control(case: str, tmp_path: Path) -> None:
    rows, status, metric = CONTROLS[case]
    control = judged(tmp_path, rows).control
    assert (control.status, control.metric) == (status, metric)
    assert bool(invalid_reasons(leaderboard_rows([tmp_path]))) == (status == "failed")
    if control.due is not None:
        assert (control.value, control.due) == (pytest.approx(5.42), pytest.approx(0.12))


REASON = "RuntimeError: stack expects each tensor to be equal size"


@pytest.mark.parametrize("guessed", [True, False])
@pytest.mark.parametrize(
    ("broken", "works", "status"),
    [
        (["inverting_gradients", "dlg"], True, "broken"),
        (["dlg"], True, "passed"),
        (["dlg"], False, "failed"),
    ],
)
def test_a_crash_is_no_attack_that_does_not_work(
    broken: list[str], works: bool, status: str, guessed: bool, tmp_path: Path
) -> None:
    values = [30.0, 31.0, 32.0] if works else FAILS[:3]
    lines = [
        *trials(values, defense="none", ssim=0.9),
        *trials(values, defense="none", attack="dlg"),
        *trials(FAILS[:3]),
        *trials(FAILS[:3], attack="dlg"),
    ]
    for row in lines:
        if row["attack"]["name"] in broken:
            row |= {"status": "failed", "reason": REASON, "metrics": None, "control": None}
            row["baseline"] = row["baseline"] if guessed else None
    each = judged(tmp_path, lines)
    assert each.control.status == status
    assert {failure.reason for failure in each.control.failures} == (
        set() if works and status == "passed" else {REASON}
    )
    kinds = {"broken": "attacks broken", "failed": "attacks fail", "passed": "no guarantee"}
    assert each.verdicts[1].reason.kind == kinds[status]
