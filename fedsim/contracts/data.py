"""Defines the data-source contract."""

from __future__ import annotations

from abc import abstractmethod

from fedsim.contracts.plugins import Plugin
from fedsim.types import Dataset, Table


class DataSource(Plugin):
    """Loads a labelled image set, or a table. Fields say where it lies and how it is prepared."""

    @abstractmethod
    def load(self) -> Dataset | Table:
        """Returns the whole set in memory, train and test split, in an order that never varies.

        Raises:
            FedsimError: the data are missing or cannot be read. The message says where they were
                sought, and the remedy.
        """

    @property
    def place(self) -> str | None:
        """File or folder that the source reads; None if data come with a package, or are drawn.

        The default is the field `path` or `root`. A node asks its owner's policy about this place.
        """
        # These are the names that data sources give to where their data lie.
        named = getattr(self, "path", None) or getattr(self, "root", None)
        return None if named is None else str(named)

    def prepared(self, dataset: Dataset | Table) -> Dataset | Table:
        """Returns `dataset` with all that this source computes from training data computed anew.

        An audit exchanges an image and calls this. Its two worlds then differ in everything that
        the image has a say in. The default returns `dataset`, as nothing is computed from it.
        """
        return dataset
