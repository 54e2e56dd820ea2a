"""Removed when all have moved."""

from fedsim.adversary import *  # noqa: F403
