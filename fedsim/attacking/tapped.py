"""Makes observations of what a tap recorded of an app; the caller adds model and training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fedsim.attacking.observe import VictimModel, own_names
from fedsim.models.local import step_weights
from fedsim.recording.exchanges import Exchange
from fedsim.types import FedsimError, LocalTraining, Mode, Observation, StepRule

TappedAnswer = Literal["weights", "delta", "gradient"]
"""Kinds of client answer: weights after training, these less the server's (delta), a gradient."""
EXAMPLES = "num-examples"
"""Name of the metric by which Flower's clients state the number of examples of an answer."""


@dataclass(frozen=True, kw_only=True)
class TappedTraining:
    """Describes one client's local training, as far as it is known, in terms of `LocalTraining`."""

    examples: int
    """Number of distinct images."""
    steps: int
    """Number of steps of all epochs together."""
    per_epoch: int
    """Number of steps of one epoch."""
    lr: float
    momentum: float = 0.0
    mode: Mode = "train"
    rule: StepRule | None = None

    @classmethod
    def of_epochs(
        cls, examples: int, *, batch_size: int, epochs: int, lr: float, momentum: float, mode: Mode
    ) -> TappedTraining:
        """Returns the training of an app that goes through shuffled `examples` in each epoch."""
        per_epoch = math.ceil(examples / batch_size)
        return cls(
            examples=examples,
            steps=epochs * per_epoch,
            per_epoch=per_epoch,
            lr=lr,
            momentum=momentum,
            mode=mode,
        )

    def training(self) -> LocalTraining:
        """Returns the local training that attacks simulate in place of the app's.

        Several epochs of several batches become one epoch whose learning rate carries the same
        total weight. Batches that differ in size become equal ones.
        """
        again = LocalTraining(
            algorithm="fedavg",
            steps=self.steps,
            batch_size=max(1, round(self.examples / self.per_epoch)),
            lr=self.lr,
            momentum=self.momentum,
            mode=self.mode,
            batches="same" if self.per_epoch == 1 and self.steps > 1 else "different",
            rule=self.rule,
        )
        if self.per_epoch == 1 or self.steps <= self.per_epoch:
            return again
        rule = self.rule
        if rule is not None and rule.rates is not None:
            # A warm-up may have rates of 0 all through its first epoch: nothing to scale, so `lr`
            # serves.
            first = rule.rates[: self.per_epoch]
            rule = replace(rule, rates=first if any(first) else None)
        once = replace(again, steps=self.per_epoch, rule=rule)
        # With momentum a gradient moves the weights in later steps, too; `step_weights` counts
        # that.
        weight = sum(step_weights(again)) / sum(step_weights(once))
        if rule is not None and rule.rates is not None:
            rule = replace(rule, rates=tuple(weight * each for each in rule.rates))
        return replace(once, lr=self.lr * weight, rule=rule)


def gradient_of(examples: int, mode: Mode) -> LocalTraining:
    """Returns the training of a client that answers the gradient of all its `examples`."""
    return LocalTraining(algorithm="fedsgd", steps=1, batch_size=examples, lr=1.0, mode=mode)


def freeze_unsent(model: nn.Module, exchange: Exchange, prefix: str) -> None:
    """Freezes the parameters of `model` that clients are not sent: they keep its public values.

    Raises:
        FedsimError: the app sends names that the model does not have.
    """
    sent = _own_names(exchange.read_broadcast(), model, prefix)
    for name, parameter in model.named_parameters():
        if name not in sent:
            parameter.requires_grad_(False)


def observe_exchange(
    exchange: Exchange,
    victim: VictimModel,
    model: nn.Module,
    training: LocalTraining,
    *,
    answer: TappedAnswer,
    prefix: str,
) -> Observation:
    """Returns the observation of one exchange of an undefended client.

    Args:
        exchange: The server's broadcast and the client's reply, as a tap recorded them.
        victim: The model, taken apart.
        model: The model itself, for its parameters' names.
        training: The client's local training.
        answer: What the client answered: `weights`, their `delta`, or a `gradient`.
        prefix: Text that stands before the app's names in the model's own names.

    Raises:
        FedsimError: the exchange is not of this model.
    """
    before = _own_names(exchange.read_broadcast(), model, prefix)
    after = _own_names(exchange.read_reply(), model, prefix)
    trained = {name for name, _ in model.named_parameters()}
    update = {
        # In float64, so that the difference is rounded once, when it becomes float32.
        name: value.double() - before[name].double() if answer == "weights" else value
        for name, value in after.items()
        if name in trained and name in before
    }
    sent = {
        name: before[name].float() + value if answer == "delta" else value
        for name, value in after.items()
        if name not in trained and value.is_floating_point() and name in before
    }
    return victim.observation(
        update, training, buffers={} if answer == "gradient" else sent, state=before
    )


def _own_names(tensors: Mapping[str, Tensor], model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Renames what an app sends: names after `prefix`, or numbers in the order of the model."""
    own = model.state_dict()
    if all(name.isdecimal() for name in tensors) and len(tensors) == len(own):
        # Sorted as numbers: as texts, "10" would come before "2".
        ordered: Sequence[Tensor] = [tensors[name] for name in sorted(tensors, key=int)]
        named = dict(zip(own, ordered, strict=True))
    else:
        named = own_names(tensors, model, "--prefix", prefix)
    for name, value in named.items():
        if name not in own:
            raise FedsimError(
                f"--model: it has no {name!r}, which the app sends: name the model that the app "
                "trains (and --prefix, if the app sends a part of it)"
            )
        if value.shape != own[name].shape:
            raise FedsimError(
                f"--model: its {name} has shape {tuple(own[name].shape)}, and the app sends "
                f"{tuple(value.shape)}: name the model that the app trains"
            )
        if own[name].is_floating_point() and not value.is_floating_point():
            raise FedsimError(
                f"{name}: the app sends {value.dtype}, and the model has {own[name].dtype}: what "
                "it quantizes has to be made numbers again before the tap"
            )
        if not torch.isfinite(value.float()).all():
            raise FedsimError(f"{name}: what was recorded holds NaN or infinity")
    return named
