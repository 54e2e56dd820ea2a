"""Defines the attack contract, and the loop that runs any attack on any observation.

`solve` restarts and chooses by the attack's own loss, never by the truth; no attack does.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import ClassVar, Generic, Literal, TypeVar, get_args, get_origin

import torch
from pydantic import BaseModel
from torch import Tensor

from fedsim import rng
from fedsim.contracts import plugins
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.contracts.plugins import Plugin
from fedsim.system import memory
from fedsim.system.device import compute_exactly, move_tensors
from fedsim.system.paths import from_home
from fedsim.types import FedsimError, Observation, Payload, Reconstruction


class AttackFailed(FedsimError):  # noqa: N818 - reads as the row's status
    """Raised if an attack can say nothing about an observation; its row states the message."""


@dataclass(kw_only=True)
class AttackState:
    """Base of the states of attacks, to which each attack adds fields of its own.

    `solve` reads both fields for its progress display. `iteration` counts the steps made: each
    `step` that does not end the attack has to increase it.
    """

    iteration: int = 0
    loss: Tensor
    """Present value of the attack's own objective, 0-d, on its device (reading it synchronizes)."""


S = TypeVar("S", bound=AttackState)


class Attack(Plugin, Generic[S]):
    """Base of attacks, which recover a client's data from an observation. Fields are parameters.

    A subclass implements `init`, `step`, `terminate` and `postprocess`, which `solve` calls.
    """

    needs: ClassVar[Grant] = Grant.least()
    """Least grant that the attack needs; one that depends on a parameter overrides `required`."""
    takes_rows: ClassVar[bool] = False
    """Whether it also attacks a model of a table's rows, and not only one of images."""
    reads: ClassVar[tuple[Payload, ...]] = ("update",)
    """Kinds of client message that it reads."""
    ignores_update: ClassVar[bool] = False
    """Whether it never looks at the update: a control, which draws what its prior knows. It is
    ranked behind all that look, and never said to work."""
    asked_of_candidates: ClassVar[bool] = False
    """Whether it scores given rows or examples by how likely they took part, and recovers none."""
    asked_of_sources: ClassVar[bool] = False
    """Whether it says which client holds each of the given examples, known to be held by one
    (`Knowledge.records`). It is `asked_of_candidates` as well, and gets those that took part, of
    all clients together."""
    follows_tensor_rate: ClassVar[bool] = False
    """Whether `fedsim.privacy.recovery.tensor_rate` is what theory predicts of its error."""
    reads_truncated: ClassVar[bool] = False
    """Whether it takes entries that a defense truncated as they are. Else it gets zeros in their
    place, declared as removed: an entry is then its true value, or nothing."""
    on_processor: ClassVar[bool] = False
    """Whether it computes on the CPU wherever the observation lies, as many small problems in
    float64 are slower on an accelerator; `solve` moves what it reads and answers."""

    @property
    def joins_rounds(self) -> bool:
        """Whether it reads recordings of all rounds together; by default, `asked_of_candidates`.

        It is then asked once of each watcher and client, or of each watcher if `asked_of_sources`.
        It attacks the last recorded update, and `Knowledge.seen` has all up to it.
        """
        return self.asked_of_candidates

    def required(self) -> Grant:
        """Returns the least grant that the attack needs with its parameters; by default `needs`."""
        return self.needs

    def brings(self) -> tuple[str, ...]:
        """Returns the data that the attack brings along, such as `public=photos`; empty if none.

        Rows of results state these and are ranked apart, as no grant covers them. The default has
        `<parameter>=<file name>`, by parameter, for every existing file or folder that one names,
        also within lists and mappings. Values that its type lists (`Literal`) are left out.
        """
        fields = type(self).model_fields
        return tuple(
            f"{name}={thing}"
            for name, value in self
            # A choice such as `adam` is none of the attack's data, even where a file is called so.
            if value not in _choices(fields[name].annotation)
            for thing in _things(value)
        )

    @abstractmethod
    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> S:
        """Returns the state before the first step, with tensors on the observation's device.

        `rng`, on the CPU, is the only source of randomness. It raises AttackFailed, with the
        reason, if nothing can be recovered from this observation.
        """

    @abstractmethod
    def step(self, state: S) -> S:
        """Makes one iteration and returns the next state, whose `iteration` is larger.

        It may change `state` in place. An AttackFailed ends the attack without an answer.
        """

    @abstractmethod
    def terminate(self, state: S) -> bool:
        """Returns whether the attack is done at `state`; `solve` asks before every step."""

    @abstractmethod
    def postprocess(self, state: S) -> Reconstruction:
        """Returns what was recovered at `state`, the last one; images are in pixels on [0, 1].

        `solve` passes over an answer with NaN or infinity; membership scores alone may be infinite.
        """

    def total(self) -> int | None:
        """Returns the most steps of one restart, for progress; None (default): unknown."""
        return None


def _choices(annotation: object) -> list[object]:
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return list(parts)
    return [choice for part in parts for choice in _choices(part)]


def _things(value: object) -> Iterator[str]:
    if isinstance(value, str | PurePath):
        if name := _name_of(str(value)):
            yield name
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _things(item)
    elif isinstance(value, BaseModel):
        for _, item in value:
            yield from _things(item)
    elif isinstance(value, Sequence | Set) and not isinstance(value, bytes):
        for item in value:
            yield from _things(item)


def _name_of(text: str) -> str | None:
    try:
        path = from_home(text)
        if not text or not path.exists():
            return None
        # Paths such as `..` have no name of their own; the resolved one says what they are.
        return path.name if path.name not in ("", "..") else str(path.resolve())
    except (OSError, ValueError, FedsimError):  # too long for a name, say: then it names none
        return None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Holds how far an attack is: `iteration` steps of `total`, from starting point `restart`.

    `restart` counts from 0 to `restarts` - 1. `total` is None if the attack does not know it.
    `loss` is the attack's own objective.
    """

    restart: int
    restarts: int
    iteration: int
    total: int | None
    loss: float


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Holds the answer of least own loss, the number of its restart (from 0), and the whole cost.

    `seconds` of wall-clock time are of all restarts. `peak_memory_bytes` is the most that this
    process ever had in use, on the observation's GPU or, for one on the CPU, in memory.
    """

    reconstruction: Reconstruction
    restart: int
    losses: tuple[float, ...]
    """Own loss of every restart, in order; NaN where its answer is not finite. Restarts without a
    finite loss are never chosen."""
    seconds: float
    iterations: int
    """Number of iterations of all restarts together."""
    peak_memory_bytes: int


def solve(
    attack: Attack[S],
    observation: Observation,
    knowledge: Knowledge,
    seed: int,
    *,
    restarts: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Runs `attack` from several starting points, and returns the answer of least own loss.

    On one machine, the same arguments have the same result but for `seconds` and memory. The answer
    is on the observation's device. A GPU computes without TF32 in this process from now on.

    Args:
        attack: The attack with its parameters.
        observation: What the attacker saw.
        knowledge: What the attacker is granted beside the observation.
        seed: Seed of all that the attack draws.
        restarts: Number of starting points, at least 1.
        progress: Function called with the attack's progress after the first step of a restart, then
            at most every 0.25 s; None: none.

    Raises:
        AttackFailed: the update is zero everywhere or not finite, the attack itself raises it, or
            no restart ended at a finite loss and a finite answer. Its other errors come through.
    """
    _refuse_unusable(observation)
    # Otherwise each iteration pays for fresh pages of the same tensors.
    memory.keep_freed()
    device = observation.device
    compute_exactly(device)
    elsewhere = attack.on_processor and device.type != "cpu"
    if elsewhere:
        observation, knowledge = move_tensors(observation, "cpu"), move_tensors(knowledge, "cpu")
    start = time.perf_counter()
    found: list[Reconstruction] = []
    for restart in range(restarts):
        # A stream for each restart: the k-th one is the same however many there are.
        state = attack.init(observation, knowledge, rng.generator(seed, "attack", restart))
        # Long ago by the clock, so that each restart's first step is reported at once.
        told = 0.0
        while not attack.terminate(state):
            state = attack.step(state)
            now = time.perf_counter()
            # Reading the loss waits for the device, and so happens only as often as it is shown.
            if progress and now - told >= _EVERY:
                told = now
                progress(
                    Progress(
                        restart=restart,
                        restarts=restarts,
                        iteration=state.iteration,
                        total=attack.total(),
                        loss=float(state.loss),
                    )
                )
        found.append(attack.postprocess(state))
    losses = tuple(result.loss if _is_finite(result) else math.nan for result in found)
    # Among equal losses the first restart wins, so that the choice is reproducible.
    best = min(range(restarts), key=lambda i: losses[i] if math.isfinite(losses[i]) else math.inf)
    if not math.isfinite(losses[best]):
        raise AttackFailed(f"no restart ended at a finite loss and answer (losses: {losses})")
    return Solution(
        reconstruction=move_tensors(found[best], device) if elsewhere else found[best],
        restart=best,
        losses=losses,
        seconds=time.perf_counter() - start,
        iterations=sum(result.iterations for result in found),
        peak_memory_bytes=memory.peak(device),
    )


_EVERY = 0.25
"""Least number of seconds between two calls of `progress`."""


def create(name: str, parameters: Mapping[str, object] | None = None) -> Attack[AttackState]:
    """Makes the attack registered as `name`, with `parameters` and the defaults of all others.

    A PluginError says that `name` is not installed, cannot be imported, or is no attack. Pydantic's
    ValidationError says that a parameter is unknown, missing or out of its range.
    """
    cls = plugins.load("fedsim.attacks", name)
    if not issubclass(cls, Attack):
        raise plugins.PluginError(f"attack plugin {name!r} does not derive from Attack")
    return cls.model_validate(dict(parameters or {}))


_AT_BOUND = 1 - 1e-6
"""Share of the bound from which an entry counts as truncated, as rounding may have moved it."""


def remove_truncated(observation: Observation) -> Observation:
    """Returns the observation with entries that a defense truncated set to 0, declared as removed.

    It is returned as it is if its `effect` declares no truncation, or is `noisy`.
    """
    effect = observation.effect
    if effect.truncated is None or effect.noisy:
        return observation
    bound = effect.truncated * _AT_BOUND
    if effect.scaled and observation.num_clients == 1:
        # A factor of the update shrinks truncated entries alike, and so the bound.
        largest = [float(t.abs().max()) for t in observation.update.values() if t.numel()]
        bound = min(bound, max(largest, default=math.inf) * _AT_BOUND or bound)
    update = {n: t.masked_fill(t.abs() >= bound, 0) for n, t in observation.update.items()}
    return replace(
        observation, update=update, effect=replace(effect, truncated=None, removed="others")
    )


def unreadable(attack: str, reads: Sequence[Payload], released: Payload | None) -> str | None:
    """Returns why `attack` (a name) cannot read messages of kind `released`; None if it can.

    `reads` has the kinds that it reads, and a `released` of None stands for what no attack reads.
    """
    if released in reads:
        return None
    what = {"update": "updates of a model", None: "what no attack reads"}
    here = what.get(released) or f"releases of kind {released}"
    readable = " and ".join(what.get(kind) or kind for kind in reads)
    return f"{attack} reads {readable}, and clients send {here}"


def _refuse_unusable(observation: Observation) -> None:
    tensors = observation.update.values()
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise AttackFailed("the observed update holds non-finite values")
    if not any(bool(tensor.any()) for tensor in tensors):
        raise AttackFailed("the observed update is zero everywhere: it carries no information")


def _is_finite(answer: Reconstruction) -> bool:
    # A likelihood ratio of membership may be infinite.
    return all(
        not bool((part.isnan() if name == "membership" else ~part.isfinite()).any())
        for name, part in answer.parts().items()
    )


def images_alone(attack: str) -> str:
    """Returns the error message that `attack` (its name) takes images, and not rows of a table."""
    return (
        f"{attack} takes a model's inputs for images, and these are rows of a table; use "
        "inverting_gradients or label_inference"
    )
