"""Defines the classifier's head: one linear layer, or the two-layer head of feature attacks.

A malicious server plants weights in it, or in an imprint module. With `observe.plant` it trains an
honest model, and plants only in the weights that it sends with a probe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedsim import rng
from fedsim.contracts.defense import ModelDefense
from fedsim.models.base import Classifier, HeadConfig, HeadDropout, activation, build, feature_size
from fedsim.models.imprint import Imprint
from fedsim.types import ModelSpec, Tensors


class TwoLayerHead(nn.Module):
    """Computes f(x) = A σ(W x + b), from features (B, d) to logits (B, K).

    Options are those of `config`; `divided` means 1 / m times that, for m hidden neurons. The last
    `planted` neurons are the server's: W is drawn from N(0, planted_std² I), b is 0, and each row
    of A is constant on them (`planted_rows`). All weights are drawn from torch's global stream.

    Source: Liu, Wang, Du and Lei, Data Reconstruction Attacks and Defenses: A Systematic
    Evaluation, section 2.1 ("weight initialization": `graded` rows, `planted` is v), and Appendix B
    (`two_groups`: rows of A in two groups make r_i = p_1i + p_2i - y_1i - y_2i, for a class of each
    group, independent of the images; `equal` for two or three classes).
    """

    def __init__(self, config: HeadConfig, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(in_features, config.width)
        """W (width, d) and b (width,)."""
        self.activation = activation(config.activation)
        self.config = config
        self.dropout = HeadDropout()
        self.output = nn.Linear(config.width, num_classes, bias=False)
        """A (K, width)."""
        if config.planted:
            self.plant()

    def forward(self, features: Tensor) -> Tensor:
        """Computes logits: (B, d) -> (B, K)."""
        hidden = self.dropout(self.activation(self.hidden(features)))
        logits: Tensor = self.output(hidden)
        return logits / self.config.width if self.config.divided else logits

    @torch.no_grad()
    def plant(self) -> None:
        """Draws the server's neurons anew in place, from torch's global stream."""
        config, classes = self.config, self.output.out_features
        first = self.hidden.out_features - config.planted
        self.hidden.weight[first:].normal_(std=config.planted_std)
        self.hidden.bias[first:].zero_()
        rows = torch.ones(classes)
        if config.planted_rows == "graded":
            rows = torch.arange(1.0, classes + 1)
        elif config.planted_rows == "two_groups":
            # With an odd number of classes, the first group has one more.
            rows[(classes + 1) // 2 :] = -1
        # Divided by their number, so that the planted neurons' part of a logit stays bounded.
        self.output.weight[:, first:] = config.planted_gain * rows[:, None] / config.planted


def make_head(config: HeadConfig | None, in_features: int, num_classes: int) -> nn.Module:
    """Builds the head of `config` (None: linear) with new weights; its last layer is `output`."""
    if config is not None:
        return TwoLayerHead(config, in_features, num_classes)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["dropout"] = HeadDropout()
    layers["output"] = nn.Linear(in_features, num_classes)
    return nn.Sequential(layers)


def assemble(
    body: nn.Module, head: HeadConfig | None, input_shape: tuple[int, ...], num_classes: int
) -> Classifier:
    """Joins a body with a new head to a classifier in train mode, on the CPU.

    Args:
        body: Computes features of a batch, of which all but the first axis are flattened.
        head: Description of a two-layer head; None for a linear one.
        input_shape: (C, H, W) of an image, or (D,) of a row.
        num_classes: K, the number of logits.
    """
    features = feature_size(body, input_shape)
    unit = head is not None and head.unit_features
    return Classifier(body, make_head(head, features, num_classes), unit_features=unit)


def plants(model: Classifier) -> bool:
    """Returns whether `model` has neurons of the server: in its head or an imprint module."""
    head = model.head
    return model.imprint is not None or (isinstance(head, TwoLayerHead) and head.config.planted > 0)


def build_honest(spec: ModelSpec, seed: int, defenses: Sequence[ModelDefense] = ()) -> Classifier:
    """Builds the model of `spec` as `base.build` does, with all of its neurons but none planted.

    An imprint module passes images unchanged. Errors are those of `base.build`.
    """
    if spec.parameters.get("head"):
        # The width stays, so that its weights fit the model that is probed.
        head = {**spec.parameters["head"], "planted": 0}
        spec = replace(spec, parameters={**spec.parameters, "head": head})
    model = build(spec, seed, defenses)
    if model.imprint is not None:
        model.imprint.unplant()
    return model


def plant_neurons(model: Classifier, parameters: Tensors, seed: int) -> dict[str, Tensor]:
    """Returns all `parameters`, by the model's names, with the server's neurons planted by `seed`.

    Layers with such neurons are copies, on the CPU; `model` and the tensors given stay as they are.
    Tensors that do not fit the model's planted layers are a RuntimeError.
    """
    values = dict(parameters)
    with rng.global_stream(seed):
        for name, part in model.named_children():
            if isinstance(part, TwoLayerHead | Imprint):
                # The model stays as it is; weights that `plant` leaves alone are those given.
                part = deepcopy(part)
                state = {n: t for n, t in parameters.items() if n.startswith(f"{name}.")}
                part.load_state_dict({n.removeprefix(f"{name}."): t for n, t in state.items()})
                part.plant()
                fresh = dict(part.named_parameters(prefix=name))
                values |= {n: fresh[n].detach().cpu() for n in state}
    return values
