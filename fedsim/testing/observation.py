"""Makes honest observations with their truth, without a federation: known answers for attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.defense import NoisyAggregation, ServerRound
from fedsim.contracts.guarantee import Release
from fedsim.contracts.stack import Stack
from fedsim.learners.sgd import train
from fedsim.models.base import build, normalize
from fedsim.models.local import features_of
from fedsim.recording.files import observation_id
from fedsim.scenario.build import announced, build_stack
from fedsim.scenario.model import PluginRef
from fedsim.types import GroundTruth, LocalTraining, ModelSpec, Observation, Tensors, Update
from fedsim.words import number_of


def make_observation(
    images: Tensor,
    labels: Tensor,
    *,
    model: str = "lenet",
    model_parameters: Mapping[str, Any] | None = None,
    num_classes: int = 10,
    training: LocalTraining | None = None,
    defense: Sequence[Mapping[str, Any]] = (),
    num_clients: int = 1,
    seed: int = 0,
    weights: Tensors | None = None,
) -> tuple[Observation, GroundTruth]:
    """Returns what a server sees of clients who train a model on `images`, and the truth.

    Args:
        images: (N, C, H, W) pixels in [0, 1]: those of the first client's first step, then of
            its second, and so on.
        labels: (N,) int64.
        model: a registered model.
        model_parameters: of the model.
        num_classes: of the model.
        training: as declared, before the training defenses; None is one gradient of each
            client's images, in train mode.
        defense: lists defenses as a scenario does, `name` and parameters each.
        num_clients: that train; several take an aggregation defense that combines them.
        seed: draws the weights and the defenses' noise.
        weights: parameters and buffers to start from, in place of fresh ones.

    Raises:
        PluginError: the model or a defense is not installed.
        RuntimeError: `weights` are not those of the model.
        ValueError: the number of images is not what the training needs, or several clients' updates
            are not combined.
    """
    refs = [reference(member) for member in defense]
    stack = build_stack(refs)
    declared = training or LocalTraining(
        algorithm="fedsgd", steps=1, batch_size=len(images) // num_clients, lr=0.1
    )
    training = stack.training(declared)
    if len(images) != training.num_images * num_clients:
        raise ValueError(
            f"expected {number_of(num_clients * training.num_images, 'image')}, "
            f"{training.num_images} of each client, got {len(images)}"
        )
    if num_clients > 1 and stack.aggregation is None:
        raise ValueError("several clients' updates need an aggregation defense to combine them")

    channels = images.shape[1]
    spec = ModelSpec(
        name=model,
        parameters=dict(model_parameters or {}),
        input_shape=(channels, images.shape[2], images.shape[3]),
        num_classes=num_classes,
        mean=(0.4,) * channels,
        std=(0.25,) * channels,
    )
    network = build(spec, rng.derive(seed, "model"))
    if weights is not None:
        network.load_state_dict(dict(weights))
    parameters = {name: value.detach().clone() for name, value in network.named_parameters()}
    buffers = {name: value.clone() for name, value in network.named_buffers()}
    updates, features = [], []
    for client, (x, y) in enumerate(
        zip(images.chunk(num_clients), labels.chunk(num_clients), strict=True)
    ):
        distinct = training.num_images // training.batch_size
        batches = list(zip(normalize(x, spec).chunk(distinct), y.chunk(distinct), strict=True))
        features += [features_of(network, parameters, buffers, b, training) for b, _ in batches]
        batches *= training.steps // distinct
        stream = rng.generator(seed, "defense", client)
        trained = train(network, parameters, buffers, batches, training, stack, stream)
        defended, _ = stack.apply(trained.update, stack.init(trained.update, declared), stream)
        updates.append(
            Update(
                tensors=defended,
                num_examples=training.num_images,
                buffers=trained.buffers if training.mode == "train" else {},
            )
        )
    update = combined(stack, updates, declared, None, seed)
    client = -1 if stack.aggregation else 0
    observation = Observation(
        id=observation_id("example", 1, client, "training"),
        update=update.tensors,
        buffers_update=update.buffers,
        parameters=parameters,
        buffers=buffers,
        spec=spec,
        training=training,
        defense=announced(stack, refs, declared, None),
        effect=stack.effect(declared),
        vantage=stack.vantage,
        round=1,
        client=client,
        num_clients=num_clients,
        trial=0,
        seed=0,
    )
    truth = GroundTruth(images=images.clone(), labels=labels.clone(), features=torch.cat(features))
    return observation, truth


def combined(
    stack: Stack,
    updates: list[Update],
    declared: LocalTraining,
    release: Release | None,
    seed: int,
) -> Update:
    """Returns what the server sees of all `updates` in its first round.

    Args:
        stack: of the federation.
        updates: of the clients.
        declared: local training before any defense changes it.
        release: of a closed-form learner, else None.
        seed: draws the server's noise.
    """
    aggregation = stack.aggregation
    if aggregation is None:
        return updates[0]
    aggregate = aggregation.combine(updates)
    if not isinstance(aggregation, NoisyAggregation):
        return aggregate
    *_, before, _ = stack.guarantees(declared, release)
    stream = rng.generator(seed, "defense", "server")
    count, bound = len(updates), before.sensitivity
    return aggregation.add_noise(
        aggregate, ServerRound(clients=count, sensitivity=bound, stream=stream, before=None)
    )


def reference(plugin: Mapping[str, Any]) -> PluginRef:
    """Returns a scenario's entry, `name` and parameters, in the form that a scenario holds."""
    parameters = {key: value for key, value in plugin.items() if key != "name"}
    return PluginRef(name=plugin["name"], parameters=parameters)


def example_batch(count: int, shape: tuple[int, int, int] = (1, 16, 16)) -> tuple[Tensor, Tensor]:
    """Returns `count` images (count, C, H, W), pixels uniform in [0, 1], and labels 3, 6, 9, ..."""
    images = torch.rand(count, *shape, generator=rng.generator(0, "example"))
    return images, (3 * torch.arange(1, count + 1)) % 10
