"""Defines what can be asked of an engine without Flower; `fedsim.federation.engine` extends it."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from fedsim.contracts.plugins import Plugin


class Engine(Plugin):
    """Carries a federation's messages, and decides where its clients compute.

    A scenario names it by `federation.engine`, and sets no parameters of it.
    """

    remote: ClassVar[bool] = False
    """Whether clients are on machines of their owners: data, truth and secrets stay there, no
    canary takes the place of a client's data, and nobody but the server combines updates."""

    @abstractmethod
    def check(self) -> None:
        """Refuses a machine on which the engine cannot run.

        Raises:
            FedsimError: the engine cannot run here; the message says the remedy.
        """
