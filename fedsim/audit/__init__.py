"""A stack's privacy claim tried inside its federation, with the code that clients run."""

from fedsim.audit.stacks import audited_epsilon, check

__all__ = ["audited_epsilon", "check"]
