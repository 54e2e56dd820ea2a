"""ExcludeVars, the filter of NVFlare that keeps named tensors at home."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, final

import torch
from pydantic import AfterValidator

from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, Tensors


def _compile(pattern: list[str] | str) -> list[str] | str:
    if isinstance(pattern, str):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
    if not pattern:
        raise ValueError("expected a name, or a regular expression that is not empty")
    return pattern


@final
class ExcludeVars(UpdateDefense):
    """Sends zeros in place of the tensors of some names; the server's copy of them never moves.

    NVFlare leaves the tensors out of the message, which tells a server as much. All other tensors
    stay as they are, finite or not.
    """

    paper: ClassVar[str] = "NVFlare 2.9.0, nvflare.app_common.filters.ExcludeVars"

    deployed_parts: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "nvflare.app_common.filters.exclude_vars.ExcludeVars": {"exclude_vars": "exclude_vars"}
    }

    exclude_vars: Annotated[list[str] | str, AfterValidator(_compile)]
    """Names of tensors, whole; or one regular expression, which is searched for in each name.
    Neither may be empty."""

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Returns the update, excluded tensors 0, and `state`. See `UpdateDefense.apply`."""
        return {
            n: torch.zeros_like(t) if self._excludes(n) else t for n, t in update.items()
        }, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns `before`: zeroing entries lengthens no update. See `UpdateDefense.guarantee`."""
        return before

    def effect(self, before: Guarantee) -> Effect:
        """Returns an Effect whose `removed` is `others`: zeros by a rule other than magnitude."""
        return Effect(removed="others")

    def _excludes(self, name: str) -> bool:
        if isinstance(self.exclude_vars, str):
            return re.search(self.exclude_vars, name) is not None
        return name in self.exclude_vars
