"""Formats figures and parameters for people, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fedsim.scoring import Accuracy, Metric, Summary
from fedsim.system import paths
from fedsim.words import describe_value


@cache
def read_texts() -> dict[str, Any]:
    """Returns every sentence that outputs print, by section of `texts.yaml`; not to be changed."""
    text = paths.text(Path(__file__).with_name("texts.yaml"), paths.TEXT)
    sections: dict[str, Any] = yaml.safe_load(text)
    return sections


def format_summary(summary: Summary | None, digits: int = 1) -> str:
    """Formats mean and interval as `18.2 [16.9, 19.4]`, a lone mean as `18.2`, None as a dash."""
    if summary is None:
        return "–"
    mean = format_number(summary.mean, digits)
    if summary.low is None or summary.high is None:
        return mean
    return f"{mean} [{format_number(summary.low, digits)}, {format_number(summary.high, digits)}]"


def format_metric(summary: Summary | None, metric: Metric) -> str:
    """Formats a summary as `metric` is shown: interval, percent or mean alone; None as a dash."""
    if metric.shown_as == "interval":
        return format_summary(summary, metric.digits)
    mean = summary.mean if summary else None
    if metric.shown_as == "percent":
        return format_percent(mean)
    return format_number(mean, metric.digits)


def format_number(value: float | None, digits: int = 2) -> str:
    """Formats `value` with `digits` decimals and a real minus sign; a dash for None."""
    return "–" if value is None else f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def format_signed(value: float, digits: int = 1) -> str:
    """Formats `value` as `+1.2` or `−1.2` with `digits` decimals; zero is `+0.0`."""
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−")


def format_percent(value: float | None) -> str:
    """Formats a share from 0 to 1 in whole percent; a dash for None."""
    return "–" if value is None else f"{value:.0%}"


def format_accuracy(share: float | None, accuracy: Accuracy | None) -> str:
    """Formats the accuracy `share`, in [0, 1], as `91% (83–96)`, with `!` if it may be chance.

    Interval and mark come from `accuracy`. Without it the text is `91%`, or a dash for None.
    """
    if accuracy is None:
        return format_percent(share)
    mark = "!" if accuracy.is_chance else ""
    return f"{share:.0%}{mark} ({100 * accuracy.low:.0f}–{100 * accuracy.high:.0f})"


def describe_stack(stack: Sequence[dict[str, Any]]) -> str:
    """Formats members (`name` and parameters) as `clip(norm=1.0) → rounding`; empty if none."""
    members = []
    for member in stack:
        name = str(member.get("name", "?"))
        inner = ", ".join(
            f"{key}={describe_value(value)}"
            for key, value in {**member, **member.get("parameters", {})}.items()
            if key not in ("name", "parameters") and value is not None
        )
        members.append(f"{name}({inner})" if inner else name)
    return " → ".join(members)
