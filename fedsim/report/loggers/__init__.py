"""Copies what a finished run measured into the store of a tool for experiments.

`entries` says what is copied, `stores` has the tools, and `logging` chooses among them. A run's own
folder stays the record: what a tool loses is lost to that tool alone.
"""

from fedsim.report.loggers.logging import chosen, log_run

__all__ = ["chosen", "log_run"]
