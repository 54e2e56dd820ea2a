"""Trains on a client's data as a pure, differentiable function of these data.

An attack runs the very function that the learner runs, on candidate images: at the true ones its
objective is exactly zero. `local_updates` trains many clients at once, on stacked weights: a small
network alone leaves a processor waiting for the next operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.models.base import Classifier
from fedsim.types import FedsimError, LocalTraining, Observation, StepRule, Tensors

_TINY = 1e-30

LossFn = Callable[[Tensors, Tensor, Tensor], Tensor]
OutputFn = Callable[[Tensors, Tensor], Tensor]
DirectionFn = Callable[[Tensors, Tensor, Tensor], Tensors]


def loss_function(model: Classifier, buffers: Tensors, training: LocalTraining) -> LossFn:
    """Returns the mean cross-entropy, 0-d, as a function of (parameters, images, labels).

    `training` may weight classes and smooth labels (`StepRule`), and layers may add terms
    (`LossTerm`). Parameters are by the model's names, and those left out are its own. Images are
    normalized, and labels are (B,) int64 or (B, K) probabilities. In train mode batch norm writes
    its running statistics into `buffers`, in place: hand over a copy and read the new statistics
    there. The model's own buffers stay as they are. Each call puts the model into the mode of
    `training`, and sets the dropout of its head. It raises a FedsimError if batch norm has a single
    value per channel to normalize.
    """
    logits = _pure(model, model.forward, buffers, training)
    rule = training.rule or StepRule()
    weights, smoothing = None, rule.label_smoothing
    if rule.class_weights is not None:
        weights = next(model.parameters()).detach().new_tensor(rule.class_weights)

    def loss(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        value = F.cross_entropy(
            logits(parameters, images), labels, weight=weights, label_smoothing=smoothing
        )
        added = model.loss_term()
        return value if added is None else value + added

    return loss


def features_function(model: Classifier, buffers: Tensors, training: LocalTraining) -> OutputFn:
    """Returns the head's inputs (B, d) as a function of (parameters, images).

    All else is as in `loss_function`.
    """
    return _pure(model, model.features, buffers, training)


def _pure(
    model: Classifier,
    forward: Callable[[Tensor], Tensor],
    buffers: Tensors,
    training: LocalTraining,
) -> OutputFn:
    # Only the caller's `buffers` are shared: there batch norm leaves its new statistics.
    state = {name: value.clone() for name, value in model.named_buffers()} | dict(buffers)
    slots = _slots(model)
    train = training.mode == "train"

    def outputs(parameters: Tensors, images: Tensor) -> Tensor:
        # train() walks all modules, which a small step would feel.
        if model.training != train:
            model.train(train)
        model.set_dropout(training.dropout)
        try:
            with _install(slots, {**state, **parameters}):
                return forward(images)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise FedsimError(
                "batch norm cannot train on one image whose feature map is a single pixel: use a "
                "batch of at least 2, `mode: eval`, the model's `norm: group`, or (resnet18) "
                "`stem: small`"
            ) from error

    return outputs


def _slots(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Returns where a module holds each parameter and buffer, by name."""
    slots: dict[str, tuple[dict[str, Any], str]] = {}
    for prefix, module in model.named_modules():
        for holder in (module._parameters, module._buffers):
            for name, value in holder.items():
                if value is not None:
                    slots[f"{prefix}.{name}" if prefix else name] = holder, name
    return slots


@contextmanager
def _install(slots: Mapping[str, tuple[dict[str, Any], str]], values: Tensors) -> Iterator[None]:
    """Lets a model compute with `values`, and with its own again afterwards."""
    # torch.func.functional_call looks all names up anew: 0.2 ms, a third of a small step.
    before = {name: slots[name][0][slots[name][1]] for name in values}
    try:
        for name, value in values.items():
            holder, key = slots[name]
            holder[key] = value
        yield
    finally:
        for name, value in before.items():
            holder, key = slots[name]
            holder[key] = value


def features_of(
    model: Classifier,
    parameters: Tensors,
    buffers: Tensors,
    images: Tensor,
    training: LocalTraining,
) -> Tensor:
    """Returns the head's inputs (B, d), detached, as the client's first step computes them.

    Args:
        model: Computes the features; it is put into the mode of `training`.
        parameters: Weights to compute with, by the model's names.
        buffers: Buffers to compute with, by the model's names; they stay as they are.
        images: (B, C, H, W), normalized; of one value a channel, batch norm raises a ValueError.
        training: Describes the client's training; only its mode counts.
    """
    state = {name: value.clone() for name, value in buffers.items()} | dict(parameters)
    model.train(training.mode == "train")
    with torch.no_grad(), _install(_slots(model), state):
        return model.features(images)


def gradient(
    loss: LossFn,
    parameters: Tensors,
    images: Tensor,
    labels: Tensor,
    *,
    create_graph: bool = False,
    on_loss: Callable[[Tensor], None] | None = None,
) -> Tensors:
    """Computes the gradient of a loss in the parameters, by their names.

    Args:
        loss: Function of (parameters, images, labels), such as `loss_function` returns.
        parameters: Weights at which it is taken; one that the loss does not use is a RuntimeError.
        images: (B, C, H, W), normalized.
        labels: (B,) int64, or (B, K) probabilities.
        create_graph: Whether the gradient is differentiable in the images.
        on_loss: Called with the detached loss, 0-d; None to call nothing.
    """
    inputs = {
        # Weights that depend on candidate images keep their graph; all others become leaves.
        name: value if value.requires_grad else value.detach().requires_grad_()
        for name, value in parameters.items()
    }
    value = loss(inputs, images, labels)
    if on_loss:
        on_loss(value.detach())
    grads = torch.autograd.grad(value, list(inputs.values()), create_graph=create_graph)
    return dict(zip(inputs, grads, strict=True))


def local_update(
    direction: DirectionFn,
    parameters: Tensors,
    batches: Iterable[tuple[Tensor, Tensor]],
    training: LocalTraining,
) -> Tensors:
    """Computes the update that `training` makes of `batches`, by the parameters' names.

    Under fedsgd that is the direction on the single batch, else the change of the weights: those
    after the last step minus `parameters`, which stay as they are.

    Args:
        direction: One step's gradient as a function of (parameters, images, labels), or what a
            defense makes of it, by the parameters' names.
        parameters: Global weights.
        batches: (normalized images, labels) of each step; fedsgd has one, else a ValueError.
        training: See `LocalTraining`; momentum follows torch.optim.SGD: v ← μ v + g, θ ← θ - lr v.
            Its `steps` are not read. More batches than `rule.rates` has are an IndexError.
    """
    if training.algorithm == "fedsgd":
        ((images, labels),) = batches
        return direction(parameters, images, labels)
    if training.rule is not None:
        return _ruled_update(direction, parameters, batches, training, training.rule)
    current = dict(parameters)
    velocity: dict[str, Tensor] = {}
    for images, labels in batches:
        step = direction(current, images, labels)
        for name, grad in step.items():
            # As in torch.optim.SGD, the first velocity is the gradient itself.
            previous = velocity.get(name) if training.momentum else None
            velocity[name] = grad if previous is None else training.momentum * previous + grad
            weight = current[name]
            # Neither the caller's weights nor those of an attack's graph may be overwritten.
            reusable = weight is not parameters[name] and not grad.requires_grad
            out = weight if reusable else None  # a client's next weights need no new memory
            current[name] = torch.sub(weight, velocity[name], alpha=training.lr, out=out)
    return {name: current[name] - parameters[name] for name in parameters}


def _ruled_update(
    direction: DirectionFn,
    parameters: Tensors,
    batches: Iterable[tuple[Tensor, Tensor]],
    training: LocalTraining,
    rule: StepRule,
) -> Tensors:
    """Returns the update of `training` under a `rule`, step for step as torch.optim computes it."""
    current = dict(parameters)
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    decoupled = rule.optimizer == "adamw"
    momentum = training.momentum if rule.optimizer == "sgd" else rule.betas[0]
    for count, (images, labels) in enumerate(batches, 1):
        lr = training.lr if rule.rates is None else rule.rates[count - 1]
        for name, step in direction(current, images, labels).items():
            weight = current[name]
            # Gradient of FedProx's term (μ / 2) ||θ - θ₀||², with θ₀ the global weights.
            if rule.proximal:
                step = step + rule.proximal * (weight - parameters[name])
            # SGD and Adam add the decay to the gradient. AdamW shrinks the weight itself, below.
            if rule.weight_decay and not decoupled:
                step = step + rule.weight_decay * weight
            # torch's SGD sums gradients undamped; Adam averages them with weight 1 - β₁.
            share = 1.0 if rule.optimizer == "sgd" else 1 - momentum
            previous = first.get(name)
            first[name] = share * step if previous is None else momentum * previous + share * step
            if rule.optimizer == "sgd":
                moved = step + momentum * first[name] if rule.nesterov else first[name]
            else:
                beta = rule.betas[1]
                squares = (1 - beta) * step.square() + beta * second.get(name, 0.0)
                second[name] = squares
                # The slope of a root at 0 is infinite.
                root = (squares / (1 - beta**count) + _TINY).sqrt() + rule.eps
                # Both averages start at 0: 1 - β^t corrects that (Kingma and Ba 2015, algorithm 1).
                moved = first[name] / (1 - momentum**count) / root
            if decoupled:
                weight = (1 - lr * rule.weight_decay) * weight
            current[name] = weight - lr * moved
    return {name: current[name] - parameters[name] for name in parameters}


def step_weights(training: LocalTraining) -> list[float]:
    """Returns the weights w of the update -lr Σ_s w_s g_s, with the gradient g_s of each step s.

    They are [1] under fedsgd, whose update is the gradient itself. All this holds only if
    `training.sums_gradients`, which is not checked.
    """
    if training.algorithm == "fedsgd":
        return [1.0]
    if training.rule is not None and training.rule.rates is not None:
        # The gradient of step s enters step s + j by momentum^j, at that step's own rate.
        later = [rate / training.lr for rate in training.rule.rates]
        return [
            sum(training.momentum**j * each for j, each in enumerate(later[s:]))
            for s in range(training.steps)
        ]
    # Step s (of T) enters 1 + μ + ... + μ^(T - s) times.
    return [sum(training.momentum**j for j in range(s)) for s in range(training.steps, 0, -1)]


def mean_gradient_factor(training: LocalTraining) -> float:
    """Returns the factor that turns an update into the mean gradient over its local steps.

    The mean has the weights of `step_weights`, whose condition holds here, too. The factor is 1
    under fedsgd, and negative under fedavg, since a change of weights points against gradients.
    """
    if training.algorithm == "fedsgd":
        return 1.0
    # The update is -lr Σ w_s g_s, of which this factor leaves the mean of g_s with weights w_s.
    return -1 / (training.lr * sum(step_weights(training)))


def update_noise(observation: Observation) -> float | None:
    """Returns the variance of the announced noise in an entry of the update, in its squared units.

    It is 0 without noise; of an update that is a mean, it is the mean's. It is None, unknown, for
    noise on a sum and for an undeclared effect. So it is for noise of steps whose optimizer does
    more than sum gradients, and for correlated noise in a mean of several releases.
    """
    training = observation.training
    variance = 0.0
    if not observation.effect.known:
        return None
    for noise in observation.effect.noise:
        if noise.on == "sum" or (noise.correlation and observation.releases > 1):
            return None  # what all releases share does not average out
        if noise.on == "update":
            variance += noise.variance
        elif not training.sums_gradients:
            return None
        else:
            weights = step_weights(training)
            taken = _variance_of_sum(weights, noise.correlation, observation.round)
            # A step's noise enters as its gradient does: by the weights, in units of -lr.
            unit = 1.0 if training.algorithm == "fedsgd" else training.lr
            variance += unit**2 * taken * noise.variance
    # The mean of several clients' updates, and of several releases of one.
    return variance / (observation.num_clients * observation.releases)


def _variance_of_sum(weights: list[float], correlation: float, round: int) -> float:
    """Returns the variance of Σ_t w_t (z_t - λ z_(t-1)) of unit z; z_0 is 0 in round 1."""
    # Collected by z_t: Σ_t (w_t - λ w_(t+1)) z_t - λ w_1 z_0, whose terms are independent.
    following = [*weights[1:], 0.0]
    kept = sum((w - correlation * f) ** 2 for w, f in zip(weights, following, strict=True))
    return kept + (correlation * weights[0]) ** 2 * (round > 1)


def local_updates(
    model: Classifier,
    parameters: Tensors,
    buffers: Tensors,
    batches: Iterable[tuple[Tensor, Tensor]],
    training: LocalTraining,
) -> Tensors:
    """Computes the updates of K clients at once, (K, ...) by the parameters' names.

    Args:
        model: Computes the loss; it is put into the mode of `training`.
        parameters: (K, ...) weights by name, from which client k's `local_update` starts.
        buffers: Buffers by name, the same for all clients.
        batches: One per step: normalized images (K, B, ...), labels (K, B) or shares (K, B, C).
        training: Training of each client, as `LocalTraining` describes it.

    Raises:
        FedsimError: the model has batch norm or dropout in train mode, which clients cannot share.
    """
    _require_batched(model, training)
    losses = torch.vmap(loss_function(model, buffers, training))

    def total(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        # No client's loss depends on another's weights, so the sum's gradient is that of each.
        each: Tensor = losses(parameters, images, labels)
        return each.sum()

    def direction(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        return gradient(total, parameters, images, labels)

    # All else in a step works entry by entry, and so on stacked weights, too.
    return local_update(direction, parameters, batches, training)


def _require_batched(model: Classifier, training: LocalTraining) -> None:
    """Refuses batch norm and dropout in training mode, which K clients cannot share."""
    if training.mode != "train":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise FedsimError(
                f"model: {name} is batch norm in training mode, which keeps statistics of one "
                "client, so clients cannot be trained at once; use `norm: group` or `mode: eval`"
            )
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if drops or (training.dropout and module in model._dropouts):
            raise FedsimError(
                f"model: {name} drops out at random in training mode, so clients cannot be trained "
                "at once; set dropout to 0, or use `mode: eval`"
            )
