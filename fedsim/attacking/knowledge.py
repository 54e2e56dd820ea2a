"""The threat model enforced: what an attack is handed, and what is withheld."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.types import (
    BatchNormKnowledge,
    FeatureKnowledge,
    GroundTruth,
    Knowledge,
    Labels,
    Observation,
    RowKnowledge,
    RowTruth,
)


def grant(
    observation: Observation,
    truth: GroundTruth | None,
    labels: Labels,
    bn: BatchNormKnowledge,
    features: FeatureKnowledge = "none",
    public_images: Tensor | None = None,
) -> tuple[Observation, Knowledge]:
    """The observation as the threat model shows it, and the knowledge granted beside it.

    Labels are handed over only if `labels == "known"`, features only if `features == "known"` (None
    if the model has no head whose features are recorded), `public_images` (P, C, H, W) if given.
    The client's new batch-norm buffers, from which its batch's statistics follow, are withheld
    below `bn == "inferred"`.

    What is handed over of the truth is a copy: an attack that writes into it changes no score.

    Raises:
        ValueError: what only the truth holds is granted, but there is no truth.
    """
    if truth is None and from_truth(labels, bn, features):
        raise ValueError(
            "known labels, known features and exact statistics can only be granted with the truth"
        )
    if bn in ("none", "running"):
        observation = replace(observation, buffers_update={})
    device = next(iter(observation.parameters.values())).device
    true_features = truth.features if truth and features == "known" else None
    return observation, Knowledge(
        labels=labels,
        true_labels=truth.labels.to(device, copy=True) if truth and labels == "known" else None,
        bn=bn,
        exact_bn=batch_statistics(observation, truth) if truth and bn == "exact" else None,
        features=features,
        true_features=None if true_features is None else true_features.to(device, copy=True),
        public="none" if public_images is None else "test",
        public_images=None if public_images is None else public_images.to(device),
    )


def grant_of_row(
    truth: RowTruth,
    target: int,
    rows: RowKnowledge,
    asked: bool,
    exchanged: torch.Generator | None = None,
) -> Knowledge:
    """What is handed over about the row `target`: the others that took part, if granted.

    And the row itself, if it is `asked` whether it took part. If it did not, and `exchanged` is
    given, one of its client's rows that did is drawn and withheld: the one in its place.
    """
    others: tuple[Tensor, ...] = ()
    if rows == "others":
        kept = truth.members.clone()
        kept[target] = False
        if asked and exchanged and not bool(truth.members[target]):
            own = (kept & (truth.clients == truth.clients[target])).nonzero().flatten()
            if len(own):
                kept[own[torch.randint(len(own), (), generator=exchanged)]] = False
        clients = range(int(truth.clients.max()) + 1)
        others = tuple(truth.rows[kept & (truth.clients == client)] for client in clients)
    return Knowledge(
        rows=rows,
        other_rows=others,
        target_client=int(truth.clients[target]),
        candidate=truth.rows[target].clone() if asked else None,
    )


def from_truth(
    labels: Labels,
    bn: BatchNormKnowledge,
    features: FeatureKnowledge,
    rows: RowKnowledge = "none",
) -> bool:
    """Whether such a grant holds anything that only the victim knows."""
    return "known" in (labels, features) or bn == "exact" or rows != "none"


def batch_statistics(observation: Observation, truth: GroundTruth) -> dict[str, Tensor]:
    """Per-channel mean and (biased) variance of the input of each batch-norm layer.

    Under the global weights, in train mode, over all of the victim's images: what no attacker has,
    and what some attack papers assume (EVALUATION rule 3). Keys: `<module>.mean`, `<module>.var`.
    """
    model = rebuild(observation).train()
    found: dict[str, Tensor] = {}

    def watch(name: str) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[f"{name}.mean"] = inputs[0].mean(dim=(0, 2, 3))
            found[f"{name}.var"] = inputs[0].var(dim=(0, 2, 3), unbiased=False)

        model.get_submodule(name).register_forward_pre_hook(hook)

    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            watch(name)
    device = next(iter(observation.parameters.values())).device
    scratch = {name: value.clone() for name, value in observation.buffers.items()}
    with torch.no_grad():
        images = normalize(truth.images.to(device), observation.model)
        functional_call(model, {**observation.parameters, **scratch}, (images,))
    return found
