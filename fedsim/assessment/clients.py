"""What is known of an app's clients: which are attacked, what they trained on, and how."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsim import scoring
from fedsim.attacking.observe import VictimModel, own_names
from fedsim.models.local import step_weights
from fedsim.recording.exchanges import Exchange
from fedsim.recording.witnessed import Testimony
from fedsim.scenario import build_stack
from fedsim.scenario.build import announce_defenses, plugin_class
from fedsim.scenario.model import PluginRef
from fedsim.types import Effect, FedsimError, LocalTraining, Mode, Observation, StepRule
from fedsim.words import number_of

TappedAnswer = Literal["weights", "delta", "gradient"]
"""Kinds of client answer: weights after training, these less the server's (delta), a gradient."""
# Distance that pixels may lie outside of [0, 1] once the normalization is undone.
_ROUNDING = 0.02


@dataclass(frozen=True)
class Picked:
    """An order to train and its answer, which are attacked, with its truth (`testimony`)."""

    exchange: Exchange
    testimony: Testimony
    number: int
    """The client's partition-id where all nodes have one of their own, else its place, from 0."""


def pick(
    exchanges: Sequence[Exchange],
    said: Mapping[str, Testimony],
    rounds: Collection[int] | Literal["last"],
    clients: int,
) -> list[Picked]:
    """Returns the exchanges that are attacked, sorted by round and the client's number.

    A `FedsimError` says that none is left, or that a witness left out images of one.

    Args:
        exchanges: All exchanges of the run, sorted by round.
        said: What a witness saw, by message id; exchanges without it are passed over.
        rounds: Rounds that are attacked, from 1; "last" for the last one with truth.
        clients: Maximum number of clients in each round; those of the lowest numbers are taken.
    """
    known = [each for each in exchanges if each.message_id in said]
    if not known:
        raise FedsimError(
            f"--truth: nothing was witnessed of any of {number_of(len(exchanges), 'exchange')} of "
            "this recording; name the folder that fedsim.witness wrote to during the same run"
        )
    wanted = {known[-1].round} if rounds == "last" else set(rounds)
    numbers = _numbers(exchanges, said)
    picked: list[Picked] = []
    for round in sorted(wanted):
        own = sorted((e for e in known if e.round == round), key=lambda e: numbers[e.node_id])
        picked += [Picked(e, said[e.message_id], numbers[e.node_id]) for e in own[:clients]]
    if not picked:
        there = sorted({each.round for each in known})
        raise FedsimError(f"rounds: expected some of {there}, got {sorted(wanted)}")
    for each in picked:
        if each.testimony.said.left_out:
            raise FedsimError(
                f"{each.testimony.path}: the witness left out "
                f"{number_of(each.testimony.said.left_out, 'image')}, so that the truth is not "
                "whole; give fedsim.witness a larger max_images, or attack another client"
            )
    return picked


def _numbers(exchanges: Sequence[Exchange], said: Mapping[str, Testimony]) -> Mapping[int, int]:
    """Numbers the nodes by their partition-ids where all have one of their own, else in order."""
    nodes = sorted({each.node_id for each in exchanges})
    partitions = {t.said.node_id: t.said.partition for t in said.values()}
    known = [partitions.get(node) for node in nodes]
    given = [number for number in known if number is not None and 0 <= number < 1_000_000]
    if len(given) == len(nodes) == len(set(given)):
        return dict(zip(nodes, given, strict=True))
    return {node: place for place, node in enumerate(nodes)}


@dataclass(frozen=True)
class Examples:
    """Reads what clients trained on, and undoes the app's normalization."""

    mean: Sequence[float] | None
    """Mean of each channel, which the app subtracts from pixels in [0, 1]; None for 0."""
    std: Sequence[float] | None
    """Standard deviation of each channel, by which the app then divides; None for 1."""
    classes: int
    """Number of the model's outputs; labels are below it."""

    def read(self, testimony: Testimony) -> tuple[Tensor, Tensor]:
        """Returns pixels in [0, 1] (N, C, H, W) and labels (N,) int64.

        A FedsimError says that the file is damaged, that pixels or labels are out of range, or that
        `mean` or `std` has not C numbers.
        """
        images, labels = testimony.images()
        outside = labels[(labels < 0) | (labels >= self.classes)]
        if len(outside):
            raise FedsimError(
                f"{testimony.path}: expected labels from 0 to {self.classes - 1}, as the model has "
                f"{self.classes} outputs, got {int(outside[0])}; name the model that the app "
                "trains (--model), and its outputs (--classes)"
            )
        return self._pixels(images, testimony.path), labels

    def _pixels(self, images: Tensor, what: Path) -> Tensor:
        for option, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != images.shape[1]:
                raise FedsimError(
                    f"{option}: expected {number_of(images.shape[1], 'number')}, one a channel, "
                    f"got {len(values)}"
                )
        std = torch.tensor([float(each) for each in self.std or (1.0,)]).view(1, -1, 1, 1)
        mean = torch.tensor([float(each) for each in self.mean or (0.0,)]).view(1, -1, 1, 1)
        pixels = images * std + mean
        low, high = float(pixels.min()), float(pixels.max())
        if low < -_ROUNDING or high > 1 + _ROUNDING:
            raise FedsimError(
                f"{what}: pixels are {low:.3g} to {high:.3g} with this mean and std, and not in "
                "[0, 1]; say what the app normalizes by (--mean 0.5,0.5,0.5 --std 0.5,0.5,0.5)"
            )
        return pixels.clamp(0, 1)


def guesser_of(
    said: Mapping[str, Testimony], picked: Sequence[Picked], examples: Examples
) -> tuple[scoring.Guesser, bool]:
    """Returns what guesses images without an update, and whether it learned from other clients.

    It learns from what `examples` reads of clients in `said` (what witnesses saw, by message id)
    besides the `picked` victims, at least one. Without others it learns from the victims' images.
    """
    victims = {each.exchange.node_id for each in picked}
    # One testimony per client, so that its images do not count once for each round.
    others = {t.said.node_id: t for t in said.values() if t.said.node_id not in victims}
    pool = list(others.values()) or [each.testimony for each in picked]
    images, labels = zip(*(examples.read(each) for each in pool), strict=True)
    # The guess is learned from 8-bit levels, as data sets hold them.
    levels = (torch.cat(images) * 255).round().to(torch.uint8)
    return scoring.Guesser(levels, torch.cat(labels)), bool(others)


_OPTIMIZERS: Mapping[str, Literal["sgd", "adam", "adamw"]] = {
    "SGD": "sgd",
    "Adam": "adam",
    "AdamW": "adamw",
}
_UNKNOWN_SETTINGS = ("amsgrad", "maximize", "dampening")
_UNDEFENDED = "none"


@dataclass(kw_only=True)
class AppTraining:
    """Tells how an app's clients train, and which defenses they apply.

    They answer with `weights`, a `delta` from the server's weights, or a `gradient`. The
    constructor refuses a defense that is unknown or out of place by a FedsimError, and a wrong
    parameter of one by pydantic's ValidationError.
    """

    answer: TappedAnswer
    local: Mapping[str, float] | None
    """Values of batch_size, at least 1, lr, maybe epochs (1), momentum (0); None: as witnessed."""
    mode: Mode
    """Mode of the model's layers while it is trained: `train` or `eval`."""
    defenses: Sequence[Mapping[str, object]]
    """Key `name` and parameters of each defense, in order, as in a scenario; empty for none."""
    notes: list[str]
    """Lines of the report; `training` appends what attacks do not model."""
    stack: str = "declared"
    """Name of the stack of defenses in the report; without defenses it is `none`."""

    def __post_init__(self) -> None:
        self._refs = [
            PluginRef(name=str(each.get("name")), parameters=_resolve_parameters(each))
            for each in self.defenses
        ]
        self._stack = build_stack(self._refs)

    def training(self, each: Picked) -> LocalTraining:
        """Returns an attacked client's local training, as attacks simulate it; adds to `notes`.

        Several epochs become one of the same total weight. A FedsimError says that `local` has
        other keys, the client states no `num-examples`, or its learning rate is unknown or 0.
        """
        seen = self._seen_training(each)
        # The witness saw all else that a training defense may change.
        return replace(seen, dropout=self._stack.training(seen).dropout)

    def _seen_training(self, each: Picked) -> LocalTraining:
        said = each.testimony.said
        if self.answer == "gradient":
            return LocalTraining(
                algorithm="fedsgd", steps=1, batch_size=said.images, lr=1.0, mode=self.mode
            )
        if self.local is None:
            return self._read_witnessed(each)
        unknown = set(self.local) - {"batch_size", "epochs", "lr", "momentum"}
        if unknown or not {"batch_size", "lr"} <= set(self.local):
            raise FedsimError(
                "local: expected batch_size and lr, and maybe epochs and momentum, got "
                f"{', '.join(sorted(self.local)) or 'nothing'}"
            )
        examples = each.exchange.number(EXAMPLES)
        # A client may state anything, also what no tensor could hold.
        if examples is None or not 1 <= examples < 2**31:
            raise FedsimError(
                f"{each.exchange.path}: the client does not say {EXAMPLES!r}, from which its steps "
                "follow; leave local out, so that it is read from the witness"
            )
        per_epoch = math.ceil(int(examples) / int(self.local["batch_size"]))
        steps = int(self.local.get("epochs", 1)) * per_epoch
        if steps != said.steps:
            self.notes.append(
                f"local: {number_of(steps, 'step')} follow from what was declared, and "
                f"the witness saw {said.steps}"
            )
        return _simulate_training(
            examples=int(examples),
            steps=steps,
            per_epoch=per_epoch,
            lr=float(self.local["lr"]),
            momentum=float(self.local.get("momentum", 0.0)),
            mode=self.mode,
        )

    def _read_witnessed(self, each: Picked) -> LocalTraining:
        said = each.testimony.said
        if said.optimizer is None or "lr" not in said.settings:
            raise FedsimError(
                f"{each.testimony.path}: the witness saw no optimizer, so that the learning rate "
                "is not known; say how the app trains (--batch-size and --lr), or that it sends a "
                "gradient (--answer gradient)"
            )
        lr, rates = said.settings["lr"], said.rates
        if not lr and rates:  # a schedule that warms up from 0
            lr = math.fsum(rates) / len(rates)
        if not lr > 0:
            raise FedsimError(
                f"{each.testimony.path}: the learning rates of all steps are 0, so that the client "
                "learned nothing; attack another round"
            )
        rule = self._rule(each, lr)
        # Images through all steps, over different ones: how often the client passed over its data.
        epochs = max(1, round(sum(said.sizes) / said.images))
        if epochs > 1 and said.steps > epochs:
            self.notes.append(
                f"local: {epochs} epochs of several batches are attacked as one epoch of the same "
                "total weight, which is an approximation"
            )
        if len(set(said.sizes)) > 1:
            self.notes.append("local: batches differ in size, and attacks take them for equal ones")
        return _simulate_training(
            examples=said.images,
            steps=said.steps,
            per_epoch=max(1, round(said.steps / epochs)),
            lr=lr,
            momentum=said.settings.get("momentum", 0.0),
            mode=self.mode,
            rule=rule,
        )

    def _rule(self, each: Picked, lr: float) -> StepRule | None:
        """Returns how the witnessed steps differ from SGD on the mean cross-entropy, if they do."""
        said, settings = each.testimony.said, each.testimony.said.settings
        unmodelled = [*said.unmodelled]
        optimizer = _OPTIMIZERS.get(str(said.optimizer), "sgd")
        if said.optimizer not in _OPTIMIZERS and "DP" not in str(said.optimizer):
            unmodelled.append(f"it steps with {said.optimizer}, which is taken for SGD")
        unmodelled += [f"it sets {name}" for name in _UNKNOWN_SETTINGS if settings.get(name)]
        if optimizer != "sgd":
            self.notes.append(
                f"local: clients step with {said.optimizer}. Attacks that compare updates simulate "
                "it; those that read labels or features off an update take it for SGD"
            )
        for what in unmodelled:
            self.notes.append(
                f"local: of the clients' training {what}, which attacks do not simulate: what "
                "they miss says little"
            )
        rates = said.rates or [lr] * said.steps
        decay = settings.get("weight_decay", 0.0)
        if optimizer == "sgd" and len(said.factors) == len(rates):
            # SGD at rate r on c times the loss is SGD at rate c r on it, with weight decay over c.
            rates = [factor * rate for factor, rate in zip(said.factors, rates, strict=True)]
            decay /= said.factors[0] or 1.0
        rule = StepRule(
            optimizer=optimizer,
            betas=(settings.get("beta1", 0.9), settings.get("beta2", 0.999)),
            eps=settings.get("eps", 1e-8),
            nesterov=bool(settings.get("nesterov")),
            weight_decay=decay,
            proximal=said.proximal,
            rates=tuple(rates) if any(rate != lr for rate in rates) else None,
            label_smoothing=said.label_smoothing,
            class_weights=None if said.class_weights is None else tuple(said.class_weights),
        )
        return rule if rule != StepRule() else None

    def describe_defense(
        self, training: LocalTraining
    ) -> tuple[str, tuple[Mapping[str, object], ...], Effect]:
        """Returns the stack's name (or `none`), members as `Observation.defense`, and effect.

        `training` is what the method of that name returned. A defense that does not fit it is a
        FedsimError.
        """
        if not self._refs:
            return _UNDEFENDED, (), Effect()
        told = announce_defenses(self._stack, self._refs, training, None)
        return self.stack, told, self._stack.effect(training)


def _resolve_parameters(each: Mapping[str, object]) -> dict[str, Any]:
    plugin = plugin_class("fedsim.defenses", str(each.get("name")))
    given = {key: value for key, value in each.items() if key != "name"}
    return plugin.model_validate(given).model_dump(mode="json")


EXAMPLES = "num-examples"
"""Name of the metric by which Flower's clients state the number of examples of an answer."""


def _simulate_training(
    *,
    examples: int,
    steps: int,
    per_epoch: int,
    lr: float,
    momentum: float,
    mode: Mode,
    rule: StepRule | None = None,
) -> LocalTraining:
    """Returns the local training that attacks simulate: epochs become one of their weight."""
    again = LocalTraining(
        algorithm="fedavg",
        steps=steps,
        batch_size=max(1, round(examples / per_epoch)),
        lr=lr,
        momentum=momentum,
        mode=mode,
        batches="same" if per_epoch == 1 and steps > 1 else "different",
        rule=rule,
    )
    if per_epoch == 1 or steps <= per_epoch:
        return again
    if rule is not None and rule.rates is not None:
        # A warm-up may have rates of 0 in all of its first epoch: then `lr` serves.
        first = rule.rates[:per_epoch]
        rule = replace(rule, rates=first if any(first) else None)
    once = replace(again, steps=per_epoch, rule=rule)
    # With momentum a gradient moves the weights in later steps, too; `step_weights` counts that.
    weight = sum(step_weights(again)) / sum(step_weights(once))
    if rule is not None and rule.rates is not None:
        rule = replace(rule, rates=tuple(weight * each for each in rule.rates))
    return replace(once, lr=lr * weight, rule=rule)


def freeze_unsent(model: nn.Module, exchange: Exchange, prefix: str) -> None:
    """Freezes, in place, the parameters of `model` that the server did not send in `exchange`.

    `prefix` is text before a name in the model, such as `head.`, which the app's names lack. A
    damaged recording, or one that does not fit the model, is a FedsimError.
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
    """Returns what a server saw in one exchange, as attacks read it, of an undefended client.

    Its round, client and id are placeholders. A FedsimError says that a recorded file is damaged,
    or does not fit the model.

    Args:
        exchange: What was sent and answered.
        victim: The app's model, taken apart.
        model: The same model, whose frozen parameters are left out of the update.
        training: The client's local training.
        answer: What clients send: `weights`, a `delta` from those sent, or a `gradient`.
        prefix: Text before a tensor's name in the model, which the app's names lack, or empty.
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
