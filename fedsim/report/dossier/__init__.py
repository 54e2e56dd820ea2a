"""The dossier: what a run is evidence of, for whoever has to judge a deployment without running it.

`content` says it as a `Document` of plain blocks, and `html` and `pdf` only set that document, so
that both say the same.
"""

from fedsim.report.dossier.writing import write_dossier

__all__ = ["write_dossier"]
