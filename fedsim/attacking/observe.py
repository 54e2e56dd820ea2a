"""Makes an observation, as an attacker on a server holds it, of anybody's model and update."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fedsim.models import live
from fedsim.types import (
    Algorithm,
    Effect,
    FedsimError,
    LocalTraining,
    Mode,
    ModelSpec,
    Observation,
    Tensors,
)
from fedsim.words import nearest, number_of

_LOCAL = ("steps", "lr", "momentum", "batches")
_NAMED = 3
RANDOM = (
    "model: it draws random numbers in training mode beside dropout; attacks take one draw for "
    "all, which is not the client's"
)
_log = logging.getLogger("fedsim.observe")


def observe(
    model: nn.Module,
    update: Mapping[str, Tensor] | Iterable[Tensor | None],
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    batch_size: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    algorithm: Algorithm = "fedsgd",
    local: Mapping[str, Any] | None = None,
    mode: Mode = "train",
    head: str | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> Observation:
    """Returns what a server sees of one undefended client that trained `model` on images.

    The loss is the mean cross-entropy of the batch, to which attacks compare what they try. Names
    in the observation are not the model's: those of the head begin with `head.`, and all others
    are the model's own behind `body.module.`.

    Args:
        model: At the weights that the client started from; takes normalized images (B, C, H, W) and
            returns logits (B, K), or something with `logits`. It is copied and stays as it is.
        update: By the names of `model.named_parameters()`: the gradient (`fedsgd`), or the weights
            after local training less those before (`fedavg`), or of state dicts. Parameters that
            need no gradient may be left out, and all names may have a prefix more or less. Or
            tensors without names in the order of `model.parameters()`, as `torch.autograd.grad`
            returns them: of all parameters, or of those that need a gradient.
        input_shape: (C, H, W) of an image.
        classes: Number K of classes.
        batch_size: Images that the update was computed from; of several local steps, in each.
        mean: Mean of each channel, which was subtracted from the client's pixels in [0, 1];
            default 0.
        std: Standard deviation of each channel, by which they were then divided; default 1.
        algorithm: `fedsgd` or `fedavg`.
        local: Local training of `fedavg`: `steps` and `lr`; `momentum` (default 0); `batches`,
            `different` (default) or `same` in each step.
        mode: Mode of the client's layers while it trained: `train` or `eval`.
        head: Name of the linear layer that classifies, where it is not the last one.
        buffers: New batch-norm buffers that the client sent beside the update, by their names;
            None: those that `update` has, if any.
        seed: Seed of attacks.

    Raises:
        FedsimError: something does not fit the model, with what was expected.
    """
    training = _training(algorithm, local, mode, batch_size)
    victim = VictimModel(
        model, input_shape=input_shape, classes=classes, mean=mean, std=std, mode=mode, head=head
    )
    named = update if isinstance(update, Mapping) else _name_tensors(update, model)
    named = own_names(named, model, "update")
    statistics = dict(model.named_buffers())
    gradient = {name: value for name, value in named.items() if name not in statistics}
    moved = {name: value for name, value in named.items() if name in statistics}
    _check(moved, {name: statistics[name] for name in moved}, "update")
    # The difference plus the model's own is what the client had; integer counters are left out.
    moved = {n: statistics[n] + v for n, v in moved.items() if statistics[n].is_floating_point()}
    if victim.random:
        _log.warning("fedsim.observe: %s", RANDOM)
    seen = victim.observation(gradient, training, buffers=moved if buffers is None else buffers)
    return replace(seen, seed=seed)


class VictimModel:
    """Takes a model of images apart once, and makes observations of any number of its updates.

    `spec` is the `ModelSpec` of these, which holds for this process alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        input_shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        mode: Mode = "train",
        head: str | None = None,
    ) -> None:
        """Takes the model apart; a FedsimError says which argument does not fit.

        Args:
            model: At the weights that clients start from; it is copied.
            input_shape: (C, H, W) of an image.
            classes: Number of classes, at least 2.
            mean: Mean of each channel, subtracted from pixels in [0, 1]; None for 0.
            std: Standard deviation of each channel, which then divides; None for 1.
            mode: Mode of the client's layers while it trains.
            head: Name of the linear layer that classifies; None: the last one.
        """
        shape = _shape(input_shape)
        if classes < 2:
            raise FedsimError(f"classes: expected at least 2, got {classes}")
        apart, self._names = live.take_apart(model, shape, classes, head)
        idle = live.find_unused(apart, mode, shape)
        every = dict(model.named_parameters())
        self._trained: Tensors = {
            name: p
            for name, p in every.items()
            if p.requires_grad and self._names[name] not in idle
        }
        self._frozen = [name for name in every if name not in self._trained]
        self.random = live.is_random(apart)
        """Whether the model draws random numbers in training mode beside dropout."""
        still = [name for name, p in every.items() if not p.requires_grad]
        self.assumed = f" (or {still[0]} is not as in the named model)" if still else ""
        """Clause for messages: a frozen parameter that is assumed to be right; empty if none."""
        self._statistics: Tensors = dict(model.named_buffers())
        state = apart.state_dict(keep_vars=False)
        self._held = {
            name: state[new].detach().clone() for name, new in self._names.items() if new in state
        }
        self.spec = ModelSpec(
            name=live.keep(apart, type(model).__name__),
            parameters={},
            input_shape=shape,
            num_classes=classes,
            mean=_channels("mean", mean, shape[0], 0.0),
            std=_channels("std", std, shape[0], 1.0),
        )

    def observation(
        self,
        update: Mapping[str, Tensor],
        training: LocalTraining,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> Observation:
        """Returns what a server sees of an undefended first-round update.

        Its `seed` is 0, and its tensors are copies, float32 but for integers. A FedsimError refuses
        one that is missing, unknown, of another shape, not finite, or frozen and not 0.

        Args:
            update: Gradient or change of weights, see `observe`, by the model's own names.
            training: The client's local training.
            buffers: New buffers of batch norm by their names; None if none were sent.
            state: Parameters and buffers that the client started from; those left out are the
                model's.
        """
        names = self._names
        # Differences of state dicts have zeros for frozen parameters: only a change contradicts.
        update = {n: v for n, v in update.items() if n not in self._frozen or bool(v.any())}
        if still := [name for name in update if name in self._frozen]:
            raise FedsimError(
                f"update.{still[0]}: the model has this parameter frozen, or its logits do not "
                "depend on it, but its update is not 0: hand over the model as it was trained "
                "(requires_grad, mode)"
            )
        _check(update, self._trained, "update")
        sent, start = dict(buffers or {}), {n: _single(v) for n, v in (state or {}).items()}
        _check(sent, {n: self._statistics[n] for n in sent if n in self._statistics}, "buffers")
        _check(start, {n: self._held[n] for n in start if n in self._held}, "state")
        held = self._held | start
        return Observation(
            # An id is a path, in which no colon may stand (`files.checked_id`).
            id=f"{self.spec.name.replace(':', '-')}/round-0001/client-0000-training",
            update=_rename_copies({name: update[name] for name in self._trained}, names),
            buffers_update=_rename_copies(sent, names),
            parameters={names[name]: held[name].detach().clone() for name in self._trained},
            buffers={
                names[name]: held[name].detach().clone()
                for name in (*self._statistics, *self._frozen)
                if name in held
            },
            spec=self.spec,
            training=training,
            defense=(),
            effect=Effect(),
            vantage="server",
            round=1,
            client=0,
            num_clients=1,
            trial=0,
            seed=0,
        )


def _training(
    algorithm: Algorithm, local: Mapping[str, Any] | None, mode: Mode, batch_size: int
) -> LocalTraining:
    if algorithm not in get_args(Algorithm):
        raise FedsimError(f"algorithm: expected fedsgd or fedavg, got {algorithm!r}")
    if mode not in get_args(Mode):
        raise FedsimError(f"mode: expected train or eval, got {mode!r}")
    if batch_size < 1:
        raise FedsimError(f"batch_size: expected at least 1, got {batch_size}")
    given = dict(local or {})
    if odd := [key for key in given if key not in _LOCAL]:
        hint = f"{nearest(odd[0], _LOCAL)} (known: {', '.join(_LOCAL)})"
        raise FedsimError(f"local: unknown key {odd[0]!r}{hint}")
    if algorithm == "fedsgd":
        if given:
            raise FedsimError("local: a gradient has no local steps; use algorithm='fedavg'")
        return LocalTraining(algorithm="fedsgd", steps=1, batch_size=batch_size, lr=1.0, mode=mode)
    if missing := [key for key in ("steps", "lr") if key not in given]:
        raise FedsimError(
            f"local: {missing[0]} is missing: of weights after local training, an attack has to "
            "know how many steps there were and of which size"
        )
    if int(given["steps"]) < 1:
        raise FedsimError(f"local.steps: expected at least 1, got {given['steps']}")
    if not 0 < float(given["lr"]) < math.inf:
        raise FedsimError(f"local.lr: expected a finite number above 0, got {given['lr']}")
    if not 0 <= float(given.get("momentum", 0.0)) < 1:
        raise FedsimError(f"local.momentum: expected 0 to below 1, got {given['momentum']}")
    if given.get("batches", "different") not in ("same", "different"):
        raise FedsimError(f"local.batches: expected same or different, got {given['batches']!r}")
    return LocalTraining(
        algorithm="fedavg",
        steps=int(given["steps"]),
        batch_size=batch_size,
        lr=float(given["lr"]),
        momentum=float(given.get("momentum", 0.0)),
        mode=mode,
        batches=given.get("batches", "different"),
    )


def _shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise FedsimError(f"input_shape: expected (C, H, W), got {tuple(input_shape)}")
    channels, height, width = map(int, input_shape)
    return channels, height, width


def _channels(
    name: str, values: Sequence[float] | None, channels: int, default: float
) -> tuple[float, ...]:
    if values is None:
        return (default,) * channels
    if len(values) != channels or not all(map(math.isfinite, values)):
        raise FedsimError(
            f"{name}: expected {number_of(channels, 'finite number')}, one a channel, got {values}"
        )
    if name == "std" and min(values) <= 0:
        raise FedsimError(f"std: expected numbers above 0, got {values}")
    return tuple(map(float, values))


def _name_tensors(update: Iterable[Tensor | None], model: nn.Module) -> Tensors:
    every = dict(model.named_parameters())
    trained = [name for name, p in every.items() if p.requires_grad]
    wanted = (
        f"update: expected {number_of(len(every), 'tensor')} in the order of model.parameters(), "
        "or a mapping from the names of model.named_parameters() to tensors"
    )
    if isinstance(update, Tensor) or not isinstance(update, Iterable):
        raise FedsimError(f"{wanted}, got {type(update).__name__}")
    given = list(update)
    if len(given) not in (len(every), len(trained)):
        raise FedsimError(f"{wanted}, got {number_of(len(given), 'tensor')}")
    # Gradients of all parameters, or of those alone that need one: their number tells which.
    names = list(every) if len(given) == len(every) else trained
    return {name: v for name, v in zip(names, given, strict=True) if v is not None}


def _check(given: Mapping[str, Tensor], wanted: Tensors, what: str) -> None:
    if lost := [name for name in wanted if name not in given]:
        raise FedsimError(
            f"{what}: {number_of(len(lost), 'parameter')} of the model missing: "
            f"{', '.join(lost[:_NAMED])}"
        )
    for name, value in given.items():
        if name not in wanted:
            raise FedsimError(f"{what}: the model has no {name!r}{nearest(name, wanted)}")
        if isinstance(value, Tensor) and value.is_complex():
            raise FedsimError(f"{what}.{name}: expected real numbers, got {value.dtype}")
        if not isinstance(value, Tensor) or value.shape != wanted[name].shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise FedsimError(
                f"{what}.{name}: expected a tensor of shape {tuple(wanted[name].shape)}, "
                f"got {shape}"
            )
        if not torch.isfinite(value.float()).all():
            raise FedsimError(f"{what}.{name}: holds NaN or infinity")


def _rename_copies(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    return {names[name]: _single(value).detach().clone() for name, value in tensors.items()}


def _single(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def own_names(
    tensors: Mapping[str, Tensor], model: nn.Module, what: str, prefix: str = ""
) -> dict[str, Tensor]:
    """Returns tensors, in their order, by the model's own names in its `state_dict`.

    Names that are the model's own once `prefix` stands before them, or as they are, are taken so.
    Otherwise a prefix that all names share (`module.`, `base_model.model.`) is taken off, or that
    of a part of the model is put before them, or both. So is a missing `default.` (of PEFT) put in.
    Tensors are returned as they are if nothing fits. A FedsimError says that several prefixes fit,
    and lead to different names.

    Args:
        tensors: Tensors by names.
        model: The model.
        what: Name of `tensors` in messages.
        prefix: Prefix to try first, with its last dot; empty: none.
    """
    own = dict(model.state_dict())
    short = {name.replace(".default.", "."): name for name in own}
    # Short names count only as long as no two parameters share one.
    aliases = own.keys() | (short.keys() if len(short) == len(own) else set())

    def rename(off: str, on: str) -> dict[str, Tensor] | None:
        names = {name: on + name.removeprefix(off) for name in tensors}
        if any(each not in aliases for each in names.values()):
            return None
        found = {short.get(names[n], names[n]): value for n, value in tensors.items()}
        fit = all(getattr(v, "shape", None) == own[name].shape for name, v in found.items())
        # A guessed prefix has to fit in shapes as well; of given names `_check` tells a wrong one.
        return found if fit or not (off or on) else None

    for on in dict.fromkeys((prefix, "")):
        if all(on + name in own for name in tensors):
            return {on + name: value for name, value in tensors.items()}
    leading = _prefixes([*tensors])
    ways: dict[tuple[str, ...], tuple[str, dict[str, Tensor]]] = {}
    parts = dict.fromkeys(("", prefix, *(each for name in own for each in _prefixes([name]))))
    for off, on in itertools.product(("", *leading), parts):
        if (found := rename(off, on)) is not None:
            # Several prefixes may lead to the same names; only different results are ambiguous.
            ways.setdefault(tuple(found), (f"{on!r} for {off!r}", found))
    if len(ways) > 1:
        listed = ", ".join(sorted(way for way, _ in ways.values())[:_NAMED])
        raise FedsimError(
            f"{what}: names may be those of several parts of the model ({listed}): give them the "
            "model's own names"
        )
    # Where nothing fits, the names stay, and the check that follows says which is wrong.
    return next((found for _, found in ways.values()), dict(tensors))


def _prefixes(names: Sequence[str]) -> list[str]:
    first = names[0] if names else ""
    dotted = [first[: end + 1] for end, each in enumerate(first) if each == "."]
    return [each for each in dotted if all(name.startswith(each) for name in names)]


def checked_examples(
    images: Tensor, labels: Tensor, spec: ModelSpec, count: int, *, where: str = ""
) -> tuple[Tensor, Tensor]:
    """Returns images and classes as float32 and int64 on the CPU.

    A FedsimError says which shape, type or range is wrong.

    Args:
        images: (N, C, H, W) pixels in [0, 1].
        labels: (N,) integers from 0.
        spec: Description of the model that classifies them.
        count: Number N >= 1 that there have to be.
        where: Text before messages.
    """
    shape = (count, *spec.input_shape)
    if tuple(images.shape) != shape:
        raise FedsimError(f"{where}images: expected shape {shape}, got {tuple(images.shape)}")
    low, high = float(images.min()), float(images.max())
    # A NaN among the pixels fails this comparison as well.
    if not 0 <= low <= high <= 1:
        raise FedsimError(
            f"{where}images: expected pixels in [0, 1], got {low:.3g} to {high:.3g}: before "
            "normalization"
        )
    whole = labels.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not whole or tuple(labels.shape) != (count,):
        raise FedsimError(
            f"{where}labels: expected {number_of(count, 'integer')}, got {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    if not 0 <= int(labels.min()) <= int(labels.max()) < spec.num_classes:
        raise FedsimError(f"{where}labels: expected 0 to {spec.num_classes - 1}")
    return images.detach().cpu().float(), labels.detach().cpu().long()
