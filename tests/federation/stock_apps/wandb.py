"""Stands in for Weights & Biases, which one of the apps logs to: it keeps nothing."""

from typing import Any


def init(**_: Any) -> None:
    """As `wandb.init`."""


def log(_metrics: dict[str, Any], **_named: Any) -> None:
    """As `wandb.log`."""
