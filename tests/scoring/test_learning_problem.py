"""What is said of a model that predicts no better than chance."""

from __future__ import annotations

from fedsim.scoring import accuracy, learning_problem


def test_a_release_in_closed_form_has_no_learning_rate_to_lower() -> None:
    """The loss of least squares is no cross-entropy, however large."""
    share = accuracy(0.5, 100, 0.5)
    trained, released = (learning_problem(share, 9.0, trains=each) for each in (True, False))
    assert trained and "diverged" in trained and "learning rate" in trained
    assert released and "diverged" not in released and "learning rate" not in released
    assert learning_problem(accuracy(0.9, 100, 0.5), 9.0, trains=False) is None
