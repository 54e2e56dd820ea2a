"""Labels from the gradient of the last layer.

With logits A h + b and cross-entropy, ∂L/∂b_k is the batch's mean of p_k minus the share of class
k, so the counts are n_k = N (E[p_k] - ∂L/∂b_k), exactly. For one image only its own entry is
negative (Zhao, Mopuri and Bilen, iDLG: Improved Deep Leakage from Gradients, 2020). For more, E[p]
has to be estimated: row k of ∂L/∂A, divided by ∂L/∂b_k, is close to the mean feature of class k,
and p at these features gives linear equations for the counts (Ma et al., Instance-wise Batch Label
Restoration via Gradients in Federated Learning, ICLR 2023). Without a bias, ∂L/∂b_k is read off
the leading direction of ∂L/∂A, at the features of dummy images (Geng et al., Towards General Deep
Leakage in Federated Learning, 2021).

Where nothing of the last layer is sent, the layers before it tell: a label decides where the
gradient points, for dummy images nearly as for others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim import rng as streams
from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import Classifier
from fedsim.models.head import TwoLayerHead
from fedsim.models.local import (
    gradient,
    loss_function,
    mean_gradient_factor,
    step_weights,
)
from fedsim.models.victim import rebuild
from fedsim.types import LocalTraining, Observation, Reconstruction, StepRule, Tensors
from fedsim_attacks._attack_kinds import DirectAttack

_DUMMIES = 32  # Gaussian images, at whose response the last layer is linearized
_COMPARED = 1 << 20  # most entries of a gradient that are compared
_HELD = 1 << 25  # most entries of all classes' gradients together: 256 MiB
_ROUNDS = 20  # rounds of the fixed-point iteration for the counts
_SLACK = 0.1  # images by which noise may raise the lower bound of a count
_SCALES = (1.02, 1.15, 1.3, 1.45, 1.6, 1.8, 2.0, 2.3, 2.7, 3.2, 4.0)
"""Clipping's factors over the least, below which shares of classes would sum to more than 1."""
_ROUNDED = 1e-2  # images by which rounding may raise the lower bound of a count; least class weight
_UNSUMMED = 1e-5  # share of the bias's gradient that rounding may leave of its sum, which is 0


@final
class LabelInference(DirectAttack):
    """Reads the labels of a batch off the last layer's gradient; it recovers no images.

    Where nothing is left of that gradient, the direction of the other layers' tells them.
    """

    takes_rows: ClassVar[bool] = True
    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Zhao et al., iDLG, 2020 (one image); Ma et al., Instance-wise Batch Label Restoration, "
        "ICLR 2023, and Geng et al., 2021 (batches)"
    )
    needs: ClassVar[Grant] = Grant.least(labels="inferred")

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns labels (N,), in any order; the loss is the counts' mean distance to integers.

        `certified` (N,) says whether the gradient has room for no others. It fails as
        `infer_labels`.
        """
        labels, residual = _infer(observation)
        sure = _are_demanded(observation, labels)
        certified = torch.full_like(labels, sure, dtype=torch.bool)
        return Reconstruction(
            labels=labels, certified=certified, loss=float(residual), iterations=0
        )


def infer_labels(observation: Observation) -> Tensor:
    """Infers labels (N,) int64, in any order; AttackFailed without a linear layer that trains."""
    return _infer(observation)[0]


def _infer(observation: Observation) -> tuple[Tensor, Tensor]:
    """Infers labels (N,) int64; also returns the mean distance of counts from integers (0-d)."""
    model, rule = rebuild(observation), observation.training.rule or StepRule()
    name = _last_linear(model, observation)
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    step = mean_gradient_factor(observation.training)
    images = observation.num_images
    left = [n for n, t in observation.update.items() if t.any()]
    if left and not any(n.startswith(f"{name}.") for n in left):
        counts = _counts_of_direction(model, observation)
        return _as_labels(counts, observation.training), counts.new_zeros(())
    features, probabilities, offset = _dummy_response(model, layer, observation)
    slopes = torch.zeros_like(probabilities)
    rows = slopes[:, None] * features
    if f"{name}.weight" in observation.update:
        rows = torch.nan_to_num(observation.update[f"{name}.weight"].double() * step)
    if f"{name}.bias" in observation.update:
        slopes = torch.nan_to_num(observation.update[f"{name}.bias"].double() * step)
    if not slopes.any():  # there is no bias, or a defense removed its gradient
        slopes = _bias_slopes(rows, features, probabilities, images)
    if images == 1:
        counts = torch.zeros_like(slopes)
        # iDLG: p_y - 1 is the only negative entry of p - y.
        counts[slopes.argmin()] = 1
        return _as_labels(counts, observation.training), counts.new_zeros(())

    def head(at: Tensor) -> Tensor:
        logits = at @ layer.weight.detach().double().T + offset
        return logits if layer.bias is None else logits + layer.bias.detach().double()

    # The factor of clipping is unknown: the one whose counts are nearest to integers is taken.
    found: list[tuple[Tensor, Tensor]] = []
    least, scales = min(float((-slopes).clamp_min(0).sum()), 1.0), [1.0]
    if observation.effect.scaled and least > 0:
        scales = [min(times * least, 1.0) for times in _SCALES]
    for scale in scales:
        unscaled = slopes / scale
        estimates = _estimate_counts(unscaled, rows / scale, features, images, head, rule)
        counts = _round_counts(estimates, unscaled, images, rule)
        found.append(((estimates - counts).abs().mean(), counts))
    residual, counts = min(found, key=lambda each: float(each[0]))
    return _as_labels(counts, observation.training), residual


def _counts_of_direction(model: Classifier, observation: Observation) -> Tensor:
    """Chooses counts (K,) for which dummy images have the gradient nearest in direction."""
    classes, device = observation.model.num_classes, observation.device
    training = replace(observation.training, dropout=0.0)
    seed = streams.derive(observation.seed, "label_inference")
    images = torch.randn(
        _DUMMIES, *observation.model.input_shape, generator=streams.generator(seed)
    ).to(device)
    loss = loss_function(model, {n: t.clone() for n, t in observation.buffers.items()}, training)

    most = min(_COMPARED, max(1, _HELD // classes))

    def entries(gradient: Tensors) -> Tensor:
        flat = torch.cat([t.flatten() for n, t in gradient.items() if observation.update[n].any()])
        return flat[:: 1 + len(flat) // most].double()

    found = []
    for label in torch.arange(classes, device=device):
        with streams.global_stream(seed):  # what a model draws
            found.append(
                entries(gradient(loss, observation.parameters, images, label.expand(_DUMMIES)))
            )
    directions = torch.stack(found)
    observed = entries(observation.update) * mean_gradient_factor(observation.training)
    along, products = directions @ observed, directions @ directions.T
    counts, one = torch.zeros_like(along), torch.eye(classes).to(along)
    for _ in range(observation.num_images):
        tried = counts + one
        lengths = (tried @ products * tried).sum(1).clamp_min(torch.finfo(along.dtype).tiny)
        counts = tried[(tried @ along / lengths.sqrt()).argmax()]
    return counts


def _are_demanded(observation: Observation, labels: Tensor) -> bool:
    """Says whether the gradient of the last bias has room for no labels but these (N,)."""
    # For any factor of clipping up to 1, but not behind what changes entries, nor of steps or
    # clients that count differently. Error signals sum to 0: else something has changed them.
    name = f"{_last_linear(rebuild(observation), observation)}.bias"
    weights = step_weights(observation.training)
    whole = observation.effect.exact and observation.num_clients == 1 and len(set(weights)) == 1
    if not whole or observation.training.rule or name not in observation.update:
        return False
    slopes = observation.update[name].double() * mean_gradient_factor(observation.training)
    if float(slopes.sum().abs()) > _UNSUMMED * float(slopes.abs().sum()):
        return False
    # ∂L/∂b_k = E[p_k] - n_k / N > -n_k / N bounds each count from below.
    least = (-len(labels) * slopes - _ROUNDED).ceil().clamp_min(0)
    return bool((least == torch.bincount(labels, minlength=len(slopes))).all())


def _last_linear(model: Classifier, observation: Observation) -> str:
    parts = model.head.named_modules()
    names = [f"head.{name}".rstrip(".") for name, part in parts if isinstance(part, nn.Linear)]
    trained = [
        name for name in names if {f"{name}.weight", f"{name}.bias"} & observation.update.keys()
    ]
    if not trained:
        lacks = "was not trained, or is not sent" if names else "is none"
        raise AttackFailed(
            f"labels are read off the last linear layer of the model's head, which {lacks}: grant "
            "known labels, or none"
        )
    return trained[-1]


def _dummy_response(
    model: Classifier, layer: nn.Linear, observation: Observation
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the last layer's mean input (d,), probabilities and offset on noise."""
    captured: list[Tensor] = []
    answers: list[Tensor] = []

    def capture(_: nn.Module, inputs: tuple[Tensor, ...], answer: Tensor) -> None:
        captured.append(inputs[0].detach())
        answers.append(answer.detach())

    hook = layer.register_forward_hook(capture)
    stream = streams.generator(observation.seed, "label_inference")
    device = observation.device
    # Nothing is known of the images but their shape and normalization.
    images = torch.randn(_DUMMIES, *observation.model.input_shape, generator=stream).to(device)
    # Batch norm answers as it did for the client: by its mode.
    model.train(observation.training.mode == "train")
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with torch.no_grad():
        logits = functional_call(model, buffers, (images,))
    hook.remove()
    beside = torch.zeros_like(logits[0], dtype=torch.double)
    if not isinstance(model.head, TwoLayerHead) and answers[-1].shape == logits.shape:
        beside = (logits.double() - answers[-1].double()).mean(0)
    return captured[0].double().mean(0), logits.double().softmax(1).mean(0), beside


def _bias_slopes(rows: Tensor, features: Tensor, probabilities: Tensor, images: int) -> Tensor:
    """Estimates what a bias's gradient (K,) would be from that of the weights (K, d)."""
    *_, directions = torch.linalg.svd(rows, full_matrices=False)
    # At one common feature h row_k = slope_k h: along h rows are slopes, up to a factor.
    along: Tensor = rows @ directions[0]
    if images == 1 and len(along) > 2:  # then |p_y - 1| is the largest entry, whatever the features
        return -along * along[along.abs().argmax()].sign()
    scale = 1 / (features @ directions[0])
    # A class that does not occur has slope E[p_k]: this corrects the scale of the dummy features.
    for _ in range(3):
        absent = images * (probabilities - scale * along) < 0.5
        if bool(absent.any()) and bool(along[absent].sum() * scale > 0):
            scale = probabilities[absent].sum() / along[absent].sum()
    return torch.nan_to_num(scale * along, posinf=0, neginf=0)


def _estimate_counts(
    slopes: Tensor,
    rows: Tensor,
    features: Tensor,
    images: int,
    head: Callable[[Tensor], Tensor],
    rule: StepRule,
) -> Tensor:
    """Estimates counts n_k >= 0 (K,) that sum to N = `images`, not rounded.

    With w_k = n_k / N and all images of class k at the feature h_k, where p is P_k,

        slope_k = Σ_j w_j P_jk - w_k    and    row_k = Σ_j w_j P_jk h_j - w_k h_k,

    solved by fixed-point iteration. Under label smoothing ε, a share ε / K of all w is taken from
    each class besides; class weights are in the w.
    """
    kept, spread = 1 - rule.label_smoothing, rule.label_smoothing / len(slopes)
    if bool(slopes.any()):  # at one common feature, row_k = slope_k h
        features = slopes @ rows / slopes.square().sum()
    means = features.expand_as(rows)
    shares = torch.full_like(slopes, 1 / len(slopes))
    for _ in range(_ROUNDS):
        joint = shares[:, None] * head(means).softmax(1)  # w_j P_jk
        shares = torch.nan_to_num((joint.sum(0) - slopes - spread) / kept).clamp_min(0)
        total = shares.sum()
        shares = torch.where(total > 0, shares / total, 1 / len(shares))
        # A class without images has no mean feature that could be solved for.
        present = shares > 0.5 / images
        solved = (joint.T @ means - rows - spread * (shares @ means)) / (kept * shares[:, None])
        means = torch.where(present[:, None], solved, features)
    if rule.class_weights is not None:
        shares = shares / shares.new_tensor(rule.class_weights).clamp_min(_ROUNDED)
        shares = shares / shares.sum()
    return shares * images


def _round_counts(estimates: Tensor, slopes: Tensor, images: int, rule: StepRule) -> Tensor:
    kept, spread = 1 - rule.label_smoothing, rule.label_smoothing / len(slopes)
    # slope_k = E[p_k] - n_k / N > -n_k / N bounds the counts from below, but for noise.
    counts = (-images * (slopes + spread) / kept - _SLACK).ceil().clamp_min(0)
    if int(counts.sum()) > images or rule.class_weights is not None:
        counts = torch.zeros_like(counts)
    for _ in range(images - int(counts.sum())):
        counts[(estimates - counts).argmax()] += 1
    return counts


def _as_labels(counts: Tensor, training: LocalTraining) -> Tensor:
    classes = torch.arange(len(counts), device=counts.device)
    # Sorted labels are dealt out like cards, so that equal ones come to different batches.
    labels = classes.repeat_interleave(counts.long())
    return labels.view(training.batch_size, -1).T.flatten()
