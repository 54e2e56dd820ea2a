"""What is assessed of a recording, and what is known of the app that made it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedsim.attacking.tapped import TappedAnswer
from fedsim.contracts.attack import create
from fedsim.contracts.grant import Grant
from fedsim.types import FedsimError

DEFAULT_ATTACKS: Mapping[str, Mapping[str, object]] = {
    "label_inference": {},
    "inverting_gradients": {"iterations": 300},
}
"""Attacks of an assessment that names none, and their parameters."""


@dataclass(frozen=True, kw_only=True)
class AssessSettings:
    """Options of `fedsim.assess`.

    Raises:
        FedsimError: no client is to be attacked, or an attack needs what is not granted.
    """

    mean: Sequence[float] | None = None
    """Mean of each channel, which the app normalizes pixels in [0, 1] by; default 0."""
    std: Sequence[float] | None = None
    """Standard deviation of each channel; default 1."""
    input_shape: tuple[int, int, int] | None = None
    """(C, H, W); default that of the truth's images."""
    classes: int | None = None
    """Number of outputs of the model; default as many as it has."""
    answer: TappedAnswer = "weights"
    """What clients send: `weights`, a `delta` from the server's weights, or a `gradient`."""
    prefix: str = ""
    """Text before the names that the app sends in the model's own, if it sends a part."""
    local: Mapping[str, float] | None = None
    """Local training: `batch_size` and `lr`, maybe `epochs` and `momentum`; default what the
    witness saw."""
    defenses: Sequence[Mapping[str, object]] = ()
    """What the app's clients do to their update before it leaves, as in a scenario."""
    attacks: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: DEFAULT_ATTACKS)
    """Names and parameters of the attacks."""
    grant: Grant = Grant()
    """What the attacker is granted besides."""
    rounds: Collection[int] | Literal["last"] = "last"
    """The rounds that are attacked; default the last one of which a truth is known."""
    clients: int = 2
    """Most clients that are attacked in each round."""
    run: int | None = None
    """Number of the recorded run; default the newest."""
    name: str | None = None
    """Title of the report; default the package of the model."""
    seed: int = 0
    """Seed of attacks."""
    workers: int | None = None
    """Processes that attack; default one a core."""
    quiet: bool = True
    """Whether no progress is shown."""

    def __post_init__(self) -> None:
        """Refuses what cannot be attacked."""
        if self.clients < 1:
            raise FedsimError(f"clients: expected at least 1, got {self.clients}")
        for attack, parameters in self.attacks.items():
            if missing := self.grant.lacks(create(attack, parameters).required()):
                raise FedsimError(f"attack {attack} {missing}")
