"""Scores of rows and of memberships: known answers, invariances, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch

from fedsim.contracts.target import GuessRequest
from fedsim.scoring import ScoringError, score, score_guess
from fedsim.targets.membership import FALSE_POSITIVES, membership_auc, membership_tpr
from fedsim.types import Reconstruction, RowTruth

ROWS = torch.tensor(
    [[0.5, 1.0, 1.0], [-0.5, 1.0, -1.0], [0.1, 1.0, 1.0], [0.9, 1.0, 0.2]], dtype=torch.float64
)
TRUTH = RowTruth(
    rows=ROWS,
    members=torch.tensor([True, True, False, True]),
    clients=torch.zeros(4, dtype=torch.int64),
    scored=torch.tensor([True, False, True]),
)


def reconstruct(rows=None, membership=None):
    return Reconstruction(rows=rows, membership=membership, loss=math.nan, iterations=0)


def test_exact_rows_score_best():
    scores = score(reconstruct(ROWS[TRUTH.members]), TRUTH)
    assert (scores["psnr"], scores["rmse"], scores["row_error"]) == (60, 0, 0)
    assert scores["row_cosine"] == pytest.approx(1) and scores["rows_recovered"] == 1
    assert scores["membership_auc"] is None and scores["attack_loss"] is None
    assert len(scores.per_image["row_error"]) == 3


def test_a_known_error():
    """0.2 off in one of two entries: RMSE 0.1 / sqrt(2) on [0, 1]; the constant does not count."""
    claimed = ROWS[TRUTH.members].clone()
    claimed[:, 0] -= 0.2
    claimed[:, 1] = -1.0
    scores = score(reconstruct(claimed), TRUTH)
    assert scores["rmse"] == pytest.approx(0.1 / math.sqrt(2))
    assert scores["psnr"] == pytest.approx(20 * math.log10(math.sqrt(2) / 0.1))
    expected = (0.04 / 1.25 + 0.04 / 1.25 + 0.04 / 0.85) / 3
    assert scores["row_error"] == pytest.approx(expected)
    assert scores["rows_recovered"] == 0
    claimed[0, 0] += 0.1 + 1e-9  # now within a twentieth of the range of 2
    assert score(reconstruct(claimed), TRUTH)["rows_recovered"] == pytest.approx(1 / 3)


def test_rows_are_never_matched():
    swapped = ROWS[TRUTH.members].flip(0)
    assert (score(reconstruct(swapped), TRUTH)["row_error"] or 0) > 0.5


def test_auc_of_ranks():
    members = torch.tensor([True, False, True, False])
    for values, expected in (
        ([4.0, 1, 3, 2], 1.0),
        ([1.0, 4, 2, 3], 0.0),
        ([1.0, 1, 1, 1], 0.5),
        ([3.0, 2, 1, 0], 0.75),
        ([math.inf, -math.inf, 0, 0], 0.875),
    ):
        assert membership_auc(torch.tensor(values), members) == expected
        lifted = torch.tensor(values, dtype=torch.float64).exp()
        assert membership_auc(lifted, members) == pytest.approx(expected)


def test_true_positives_where_few_are_falsely_accused():
    members = torch.arange(140) < 40
    scores = torch.arange(140, dtype=torch.float64).flip(0)  # every member above all others
    assert membership_tpr(scores, members, 0.05) == 1
    scores[40:46] = 1000.0  # six of 100 others above everybody: the threshold is among them
    assert membership_tpr(scores, members, 0.05) == 0
    assert membership_tpr(scores, members, 0.07) == 1
    assert membership_tpr(torch.zeros(140), members, 0.05) == 0
    few = membership_tpr(scores[:58], members[:58], 0.05)
    assert few.reason == "18 candidates took no part; a rate of 0.05 takes 19"


@pytest.mark.parametrize("others", [19, 20, 38, 39, 100])
def test_a_coin_is_right_no_oftener_than_it_is_wrong(others):
    """Where the threshold is the highest of few others, as many members are above as should."""
    stream = torch.Generator().manual_seed(others)
    members = torch.arange(others + 40) < 40
    drawn = torch.rand(4000, others + 40, generator=stream, dtype=torch.float64)
    rates = [membership_tpr(scores, members, 0.05) for scores in drawn]
    mean = sum(rate for rate in rates if isinstance(rate, float)) / len(rates)
    expected = int(0.05 * (others + 1) + 1e-9) / (others + 1)
    assert mean == pytest.approx(expected, abs=0.003)
    assert mean < 0.053


def test_membership_scores():
    scores = score(reconstruct(membership=torch.tensor([2.0, 1.0, 1.5, 3.0])), TRUTH)
    assert scores["membership_auc"] == pytest.approx(2 / 3)
    assert scores["row_error"] is None
    everybody = replace(TRUTH, members=torch.ones(4, dtype=torch.bool))
    alone = score(reconstruct(membership=torch.zeros(4)), everybody)
    assert alone["membership_auc"] is None and "all candidates" in alone.notes["membership_auc"]


def test_the_guess_knows_the_others_but_not_the_target():
    guess = score_guess(GuessRequest(truth=TRUTH))
    members = ROWS[TRUTH.members]
    others = torch.stack(
        [members[[1, 2]].mean(0), members[[0, 2]].mean(0), members[[0, 1]].mean(0)]
    )
    assert guess["row_error"] == score(reconstruct(others), TRUTH)["row_error"]
    assert guess["membership_auc"] == 0.5 and guess["membership_tpr"] == FALSE_POSITIVES
    moved = replace(TRUTH, rows=torch.cat([ROWS[:2], ROWS[2:3] * 0.3, ROWS[3:]]))
    assert score_guess(GuessRequest(truth=moved)) == guess, "a row that took no part is not known"
    nobody = replace(TRUTH, members=torch.zeros(4, dtype=torch.bool))
    assert score_guess(GuessRequest(truth=nobody))["psnr"] is None


@pytest.mark.parametrize(
    ("claimed", "message"),
    [
        (reconstruct(), "no rows, no members"),
        (reconstruct(ROWS), "those that took part"),
        (reconstruct(2 * ROWS[:3]), "beyond"),
        (reconstruct(ROWS[:3] * math.nan), "finite"),
        (reconstruct(membership=torch.zeros(3)), "4 candidates"),
        (reconstruct(membership=torch.full((4,), math.nan)), "NaN"),
    ],
)
def test_what_is_no_answer_is_refused(claimed, message):
    with pytest.raises(ScoringError, match=message):
        score(claimed, TRUTH)
