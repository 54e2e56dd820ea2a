"""Formats figures and parameters for people, the same in the terminal and on the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fedsim.scoring import Accuracy, Metric, Summary
from fedsim.system import paths


@cache
def read_texts() -> dict[str, Any]:
    """Returns every sentence that outputs print, by the sections of `texts.yaml`."""
    text = paths.text(Path(__file__).with_name("texts.yaml"), paths.TEXT)
    sections: dict[str, Any] = yaml.safe_load(text)
    return sections


def format_summary(summary: Summary | None, digits: int = 1) -> str:
    """Formats `summary` as `18.2 [16.9, 19.4]`.

    Numbers have `digits` digits after the point. Without an interval the text is the mean alone,
    and for None a dash.
    """
    if summary is None:
        return "–"
    mean = format_number(summary.mean, digits)
    if summary.low is None or summary.high is None:
        return mean
    return f"{mean} [{format_number(summary.low, digits)}, {format_number(summary.high, digits)}]"


def format_metric(summary: Summary | None, metric: Metric) -> str:
    """Formats a summary of `metric` as the table of metrics says; a dash for None."""
    if metric.shown_as == "interval":
        return format_summary(summary, metric.digits)
    mean = summary.mean if summary else None
    if metric.shown_as == "percent":
        return format_percent(mean)
    return format_number(mean, metric.digits)


def format_epsilon(epsilon: float | None) -> str:
    """Formats ε as `3.2` or `∞`, rounded up; a dash for None (not accounted)."""
    if epsilon is None:
        return "–"
    return "∞" if math.isinf(epsilon) else _round_to(epsilon, 3, ROUND_CEILING)


def format_delta(delta: float) -> str:
    """Formats δ as `1e-05`, rounded up."""
    return _round_to(delta, 6, ROUND_CEILING)


def format_bound(epsilon: float) -> str:
    """Formats the lower bound that an audit found for ε, rounded down."""
    return _round_to(epsilon, 3, ROUND_FLOOR)


_SEARCH_ERROR = Decimal("1e-6")
"""Relative error of an ε that comes from the search for a noise scale. Rounding need not allow for
it."""


def _round_to(value: float, digits: int, rounding: str) -> str:
    """Formats `value` with so many significant digits."""
    exact = Decimal(value)
    for mode in (ROUND_HALF_EVEN, rounding):
        short = Context(prec=digits, rounding=mode).plus(exact)
        if abs(short - exact) <= _SEARCH_ERROR * abs(exact):
            break
    return f"{float(short):.{digits}g}"


def format_claim(
    epsilon: float | None, delta: float | None, unit: str | None, relation: str | None
) -> str:
    """Formats ε with its δ, unit and neighbours, as `3.2 (1e-05, example, replace one)`.

    An infinite ε is `∞` alone, and None is a dash. A relation that only hides how far apart values
    are, or which of several declared databases was used, is no differential privacy. The text then
    says `no DP`.

    Args:
        epsilon: ε; inf if nothing is guaranteed, None if nothing was accounted.
        delta: δ of that ε.
        unit: Unit whose presence is hidden, such as `example`.
        relation: Relation of neighbouring data sets, such as `replace_one`.
    """
    if epsilon is None or math.isinf(epsilon):
        return format_epsilon(epsilon)
    words = [format_delta(delta) if delta is not None else "δ unknown"]
    words += [unit or "unit unknown", (relation or "neighbours unknown").replace("_", " ")]
    if relation in NO_DIFFERENTIAL_PRIVACY:
        words.append("no DP")
    return f"{format_epsilon(epsilon)} ({', '.join(words)})"


NO_DIFFERENTIAL_PRIVACY = ("relative", "close")
"""Relations under which an ε does not hide whether an example is present."""


def format_number(value: float | None, digits: int = 2) -> str:
    """Formats `value` with `digits` decimals; a dash for None."""
    return "–" if value is None else f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def format_signed(value: float, digits: int = 1) -> str:
    """Formats `value` as `+1.2` or `−1.2`, with a real minus sign; zero is `+0.0`.

    The number has `digits` digits after the point.
    """
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−")


def format_percent(value: float | None) -> str:
    """Formats a share from 0 to 1 in whole percent; a dash for None."""
    return "–" if value is None else f"{value:.0%}"


def format_accuracy(share: float | None, accuracy: Accuracy | None) -> str:
    """Formats an accuracy as `91% (83–96)`, with `!` if no better than chance.

    `accuracy` has the interval. Without it the text is `share` (0 to 1) alone, or a dash for None.
    """
    if accuracy is None:
        return format_percent(share)
    mark = "!" if accuracy.is_chance else ""
    return f"{share:.0%}{mark} ({100 * accuracy.low:.0f}–{100 * accuracy.high:.0f})"


def describe_variant(variant: Mapping[str, Any]) -> str:
    """Formats a variant as `training.mode=eval, …`; empty for a run outside of a sweep."""
    return ", ".join(f"{key}={_plain(value)}" for key, value in variant.items())


def describe_stack(stack: Sequence[dict[str, Any]]) -> str:
    """Formats a stack as `clip(norm=1.0) → gaussian_noise(multiplier=1.1)`.

    The text is empty for no defense.
    """
    return " → ".join(_describe_member(member) for member in stack)


def _describe_member(member: dict[str, Any]) -> str:
    fields = {**member, **member.get("parameters", {})}
    inner = ", ".join(
        f"{key}={_plain(value)}"
        for key, value in fields.items()
        if key not in ("name", "parameters") and value is not None
    )
    return f"{member.get('name', '?')}({inner})" if inner else str(member.get("name", "?"))


_READABLE = 8
"""Numbers of more characters were computed, not chosen, and are shortened."""


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{value:.4g}" if isinstance(value, float) and len(text) > _READABLE else text
