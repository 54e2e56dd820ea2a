"""A stack's privacy claim tried inside its federation, with the code that clients run."""

from fedsim.audit.stacks import Step, audited_epsilon, check, quiet

__all__ = ["Step", "audited_epsilon", "check", "quiet"]
