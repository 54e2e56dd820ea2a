"""The dossier: what a run is evidence of, for whoever has to judge a deployment without running it.

`content` says it as a `Document` of plain blocks, and `writing` sets that document as a page.
"""

from fedsim.report.dossier.writing import write_dossier

__all__ = ["write_dossier"]
