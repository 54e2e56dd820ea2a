"""Models as their libraries build them, with random weights, observed and attacked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from slow_cases import slow_but
from torch import Tensor, nn

import fedsim
from fedsim.types import Observation

CLASSES = 10


def _torchvision(name: str) -> nn.Module:
    from torchvision import models

    if name == "vit":
        return models.VisionTransformer(
            image_size=32,
            patch_size=8,
            num_layers=1,
            num_heads=2,
            hidden_dim=32,
            mlp_dim=64,
            num_classes=CLASSES,
        )
    if name == "googlenet":
        return models.googlenet(num_classes=CLASSES, aux_logits=True, init_weights=False)
    model: nn.Module = models.get_model(name, num_classes=CLASSES)
    return model


def _transformers(name: str) -> nn.Module:
    import transformers

    small = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES}
    if name == "vit":
        config = transformers.ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=CLASSES,
        )
        return transformers.ViTForImageClassification(config)
    if name == "resnet":
        return transformers.ResNetForImageClassification(
            transformers.ResNetConfig(embedding_size=16, **small)
        )
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(num_stages=2, **small)
    )


def _timm(name: str) -> nn.Module:
    import timm

    small = {"img_size": 32, "patch_size": 8, "depth": 1} if "vit" in name else {}
    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **small)
    return model


BUILT: dict[str, Callable[[], nn.Module]] = {
    **{
        f"torchvision {name}": lambda name=name: _torchvision(name)
        for name in ("resnet18", "mobilenet_v3_small", "vit", "googlenet")
    },
    **{
        f"transformers {name}": lambda name=name: _transformers(name)
        for name in ("vit", "resnet", "convnext")
    },
    **{
        f"timm {name}": lambda name=name: _timm(name)
        for name in ("resnet18", "vit_tiny_patch16_224", "mobilenetv3_small_050")
    },
}


def observed(
    model: nn.Module, images: Tensor, label: int, mean: float = 0.0, std: float = 1.0
) -> Observation:
    """What a server sees of one image's gradient in evaluation mode, normalized alike."""
    answer = model((images - mean) / std)
    loss = nn.functional.cross_entropy(getattr(answer, "logits", answer), torch.tensor([label]))
    update = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return fedsim.observe(
        model,
        update,
        input_shape=(3, *images.shape[2:]),
        classes=CLASSES,
        batch_size=1,
        mean=(mean,) * 3,
        std=(std,) * 3,
        mode="eval",
    )


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["torchvision resnet18", "transformers vit", "timm vit_tiny_patch16_224"], BUILT.keys()
    ),
)
def test_a_librarys_model_is_attacked_as_it_is(name: str) -> None:
    """Labels are read off its classifier, and images are sought through all of it."""
    torch.manual_seed(1)
    model = BUILT[name]().eval()
    side = 64 if "googlenet" in name else 32
    images, labels = torch.rand(1, 3, side, side), torch.tensor([7])
    seen = observed(model, images, 7)
    _, row = fedsim.attack(seen, "label_inference", truth=(images, labels))
    assert row["metrics"]["label_accuracy"] == 1.0
    found, row = fedsim.attack(
        seen, "inverting_gradients", {"iterations": 4}, truth=(images, labels)
    )
    assert found.images is not None and found.images.shape == images.shape
    assert row["metrics"]["psnr"] > 0


@pytest.mark.parametrize("name", [name for name in BUILT if "vit" in name])
def test_the_image_of_a_librarys_transformer_is_solved_for(name: str) -> None:
    """Its patch embedding and its position embedding are found by running it."""
    torch.manual_seed(1)
    model = BUILT[name]().eval()
    for head in (part for part in model.modules() if isinstance(part, nn.Linear)):
        if head.out_features == CLASSES:
            nn.init.normal_(head.weight, std=0.02)  # torchvision's are zero at first
    images, labels = torch.rand(1, 3, 32, 32), torch.tensor([7])
    seen = observed(model, images, 7, mean=0.5, std=0.5)
    found, row = fedsim.attack(seen, "patch_inversion", truth=(images, labels))
    assert row["metrics"]["psnr"] > 40
    assert found.determined is not None and bool(found.determined.all())
