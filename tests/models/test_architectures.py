"""Laws that hold for every model, every head and every image shape it accepts; the KAN by scipy."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.interpolate import BSpline
from torch import nn
from torch.func import functional_call

from fedsim.models.base import Classifier, build
from fedsim.models.kan import basis_size, spline_basis
from fedsim.types import FedsimError, ModelSpec

SMALL = {
    "convnet": {"width": 4},
    "kan": {"hidden": 6},
    "lenet": {},
    "mlp": {"hidden": [16, 8]},
    "resnet18": {"width": 4, "norm": "group"},
    "vit": {"width": 8, "heads": 2},
}
VARIANTS = [
    *SMALL.items(),
    ("convnet", {"width": 2, "depth": 8, "norm": "batch", "activation": "sigmoid"}),
    ("convnet", {"width": 4, "norm": "none", "activation": "tanh"}),
    ("lenet", {"init_scale": None, "activation": "softplus"}),
    ("mlp", {"hidden": []}),
    ("resnet18", {"width": 2}),
    ("resnet18", {"width": 2, "stem": "imagenet", "norm": "group"}),
    ("vit", {"width": 8, "heads": 2, "norm": "post", "pool": "mean", "depth": 1, "mlp_ratio": 2}),
]
HEADS = [None, {"width": 12, "planted": 8, "activation": "softplus"}]
SHAPES = [(1, 28, 28), (1, 8, 8), (3, 32, 32), (3, 64, 64)]
LEAST = {"convnet": 9, "kan": 1, "lenet": 8, "mlp": 1, "resnet18": 5, "imagenet": 17, "vit": 4}
CLASSES = 5


def spec(name, parameters, shape=(3, 32, 32), num_classes=CLASSES):
    mean = (0.5,) * shape[0]
    return ModelSpec(
        name=name,
        parameters=parameters,
        input_shape=shape,
        num_classes=num_classes,
        mean=mean,
        std=mean,
    )


def least(name, parameters):
    return LEAST[parameters.get("stem", name)]


CASES = [
    pytest.param(
        spec(name, {**parameters, "head": head}, shape),
        id=f"{name}-{index}-{'planted' if head else 'linear'}-{'x'.join(map(str, shape))}",
    )
    for index, (name, parameters) in enumerate(VARIANTS)
    for head, shape in itertools.product(HEADS, SHAPES)
    if shape[1] >= least(name, parameters)
]


@pytest.mark.parametrize("case", CASES)
def test_forward_is_head_of_features_and_everything_has_a_gradient(case):
    model = build(case, seed=1)
    assert isinstance(model, Classifier)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(2, *case.input_shape, generator=generator)
    model.eval()
    features = model.features(images)
    assert features.dim() == 2
    assert model.head.get_submodule("output").out_features == CLASSES
    torch.testing.assert_close(model.head(features), model(images), rtol=0, atol=0)
    model.train()
    loss = F.cross_entropy(model(images), torch.tensor([0, 3]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert gradient.shape == parameter.shape
        assert torch.isfinite(gradient).all(), name
    assert sum(float(gradient.abs().sum()) for gradient in gradients) > 0


@pytest.mark.parametrize("head", HEADS, ids=["linear", "planted"])
@pytest.mark.parametrize("name", SMALL)
def test_gradient_matching_can_be_differentiated_in_the_images(name, head):
    """Double backward agrees with finite differences, in double precision."""
    case = spec(name, {**SMALL[name], "head": head}, (1, 12, 12), num_classes=3)
    model = build(case, seed=3).double()
    generator = torch.Generator().manual_seed(4)
    # A direction, so that one number is compared instead of 2 x 144 columns.
    start, direction = torch.randn(2, 2, 1, 12, 12, dtype=torch.float64, generator=generator)
    names = [name for name, _ in model.named_parameters()]
    values = [parameter.detach().requires_grad_() for parameter in model.parameters()]

    def objective(images):
        loss = F.cross_entropy(
            functional_call(model, dict(zip(names, values, strict=True)), (images,)),
            torch.tensor([0, 2]),
        )
        return sum((g**2).sum() for g in torch.autograd.grad(loss, values, create_graph=True))

    images = start.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(images), images)
    step = 1e-6
    numeric = (objective(start + step * direction) - objective(start - step * direction)) / (
        2 * step
    )
    expected = float((slope * direction).sum())
    assert expected != 0
    assert float(numeric.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("name", "parameters"), SMALL.items())
@pytest.mark.parametrize("head", HEADS, ids=["linear", "planted"])
def test_weights_are_a_function_of_the_seed_alone(name, parameters, head):
    case = spec(name, {**parameters, "head": head})
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = build(case, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(17)
    second = build(case, seed=5).state_dict()
    other = build(case, seed=6).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(("name", "parameters"), VARIANTS)
def test_the_head_does_not_change_the_body(name, parameters):
    plain = build(spec(name, parameters), seed=7).body.state_dict()
    planted = build(spec(name, {**parameters, "head": HEADS[1]}), seed=7).body.state_dict()
    assert all(torch.equal(plain[key], planted[key]) for key in plain)


@pytest.mark.parametrize(("name", "parameters"), VARIANTS)
def test_too_small_images_are_refused_with_a_remedy(name, parameters):
    size = least(name, parameters)
    build(spec(name, parameters, (1, size, size)), seed=0)
    if name in ("kan", "mlp"):
        return
    for shape in ((1, size - 1, size), (1, size, size - 1)):
        with pytest.raises(FedsimError, match=rf"at least {size}x{size}.*enlarge"):
            build(spec(name, parameters, shape), seed=0)


def test_lenet_is_that_of_deep_leakage_from_gradients():
    model = build(spec("lenet", {}, num_classes=100), seed=0)
    reference = nn.Sequential(
        *(nn.Conv2d(3, 12, 5, padding=2, stride=2), nn.Sigmoid()),
        *(nn.Conv2d(12, 12, 5, padding=2, stride=2), nn.Sigmoid()),
        *(nn.Conv2d(12, 12, 5, padding=2, stride=1), nn.Sigmoid()),
        *(nn.Flatten(), nn.Linear(768, 100)),
    )
    assert_same_function(model, reference)
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert float(values.min()) >= -0.5
    assert float(values.max()) <= 0.5
    assert float(values.std()) == pytest.approx(12**-0.5, rel=0.01)
    assert build(spec("lenet", {"init_scale": 0.1}), seed=0).head.output.weight.abs().max() <= 0.1


def test_convnet_at_depth_8_is_convnet64():
    w = 4
    model = build(spec("convnet", {"depth": 8, "width": w, "norm": "batch"}), seed=0)

    def conv(inputs, outputs):
        return nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()

    reference = nn.Sequential(
        *(*conv(3, w), *conv(w, 2 * w), *conv(2 * w, 2 * w), *conv(2 * w, 4 * w)),
        *(*conv(4 * w, 4 * w), *conv(4 * w, 4 * w), nn.MaxPool2d(3)),
        *(*conv(4 * w, 4 * w), *conv(4 * w, 4 * w), nn.MaxPool2d(3)),
        *(nn.Flatten(), nn.Linear(36 * w, CLASSES)),
    )
    assert_same_function(model, reference)


def assert_same_function(model, reference):
    """Same parameters in the same order, and the same logits of the same images."""
    values = list(model.state_dict().values())
    reference.load_state_dict(dict(zip(reference.state_dict(), values, strict=True)))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(images), reference(images))


@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_resnet18_is_torchvisions(stem):
    from torchvision.models import resnet18

    reference = resnet18(num_classes=CLASSES)
    if stem == "small":
        reference.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
        reference.maxpool = torch.nn.Identity()
    assert_takes_weights(build(spec("resnet18", {"stem": stem}), seed=0), reference, "fc")


def assert_takes_weights(model, reference, head):
    """The weights of a library's model fit by their names, and give the same logits."""
    body = dict(reference.state_dict())
    output = {f"output.{name}": body.pop(f"{head}.{name}") for name in ("weight", "bias")}
    model.body.load_state_dict(body)
    model.head.load_state_dict(output)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model.eval(), reference.eval()
    torch.testing.assert_close(model(images), reference(images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pool", ["class_token", "mean"])
def test_vit_is_timms(pool):
    from timm.models.vision_transformer import VisionTransformer

    classed = pool == "class_token"
    reference = VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=3,
        num_classes=CLASSES,
        class_token=classed,
        global_pool="token" if classed else "avg",
    )
    model = build(spec("vit", {"patch": 8, "width": 24, "heads": 3, "pool": pool}), seed=0)
    assert_takes_weights(model, reference, "head")


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_blocks_of_a_vit_are_torchs_encoder_layers(norm):
    model = build(spec("vit", {"width": 24, "heads": 3, "depth": 1, "norm": norm}), seed=0)
    block = model.body.blocks[0]
    reference = nn.TransformerEncoderLayer(
        24, 3, 96, dropout=0, activation="gelu", layer_norm_eps=1e-6, batch_first=True
    )
    reference.norm_first = norm == "pre"
    names = {
        "attn.qkv.weight": "self_attn.in_proj_weight",
        "attn.qkv.bias": "self_attn.in_proj_bias",
    }
    for ours, theirs in (("attn.proj", "self_attn.out_proj"), ("mlp.fc1", "linear1")):
        names |= {f"{ours}.{each}": f"{theirs}.{each}" for each in ("weight", "bias")}
    names |= {f"mlp.fc2.{each}": f"linear2.{each}" for each in ("weight", "bias")}
    reference.load_state_dict({names.get(n, n): value for n, value in block.state_dict().items()})
    tokens = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block(tokens), reference(tokens), rtol=1e-5, atol=1e-6)


def test_patches_that_do_not_fill_images_are_refused_with_a_remedy():
    with pytest.raises(FedsimError, match=r"model.patch.*5x5.*32x32.*divisor"):
        build(spec("vit", {"patch": 5}), seed=0)
    with pytest.raises(ValueError, match=r"heads \(3\) do not divide the width \(16\)"):
        build(spec("vit", {"width": 16, "heads": 3}), seed=0)


DEGREES = [1, 2, 3, 5]


def reference(x: np.ndarray, degree: int, intervals: int) -> np.ndarray:
    """(n, functions) by scipy."""
    knots = -1 + 2 / intervals * np.arange(-degree, intervals + degree + 1)
    columns = []
    for index in range(intervals + degree):
        spline = BSpline.basis_element(knots[index : index + degree + 2], extrapolate=False)
        columns.append(np.nan_to_num(spline(x)))
    return np.stack(columns, axis=-1)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("intervals", [1, 4, 7])
def test_the_basis_is_scipys(degree: int, intervals: int) -> None:
    x = torch.linspace(-1, 1, 401, dtype=torch.float64)[:-1] + 1 / 400
    basis = spline_basis(x, degree, intervals)
    assert basis.shape == (len(x), basis_size(degree, intervals))
    np.testing.assert_allclose(basis, reference(x.numpy(), degree, intervals), atol=1e-13)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_partition_of_unity_up_to_both_ends(degree: int, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-1, 1, 1001), torch.tensor([-1.0, 1.0])]).to(dtype)
    basis = spline_basis(x, degree, 5)
    assert bool((basis >= -1e-6).all())
    torch.testing.assert_close(basis.sum(-1), torch.ones_like(x))
    torch.testing.assert_close(basis.flip(-1), spline_basis(-x, degree, 5), atol=2e-6, rtol=1e-4)


def model(seed: int = 0, **parameters: object) -> Classifier:
    return build(spec("kan", {"hidden": 5, **parameters}, (1, 3, 3), 3), seed)


def test_it_is_the_formula() -> None:
    kan = model(degree=4, intervals=3)
    images = 3 * torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(1))
    w, c = kan.body[3].weight, kan.head.output.weight  # type: ignore[index, union-attr]
    x = torch.tanh(images.flatten(1))
    hidden = torch.tanh(
        torch.einsum("bip,kip->bk", spline_basis(x, 4, 3), w.view(5, 9, 7)) / math.sqrt(9)
    )
    expected = torch.einsum("bkp,ckp->bc", spline_basis(hidden, 4, 3), c.view(3, 5, 7))
    torch.testing.assert_close(kan(images), expected / math.sqrt(5))


def test_training_the_first_layer_leaves_the_second_as_it_is_for_everybody() -> None:
    fixed = model(train="first")
    assert [name for name, _ in fixed.named_parameters()] == ["body.3.weight"]
    assert not list(fixed.named_buffers())
    images = torch.randn(2, 1, 3, 3)
    other = model(seed=1, train="first")
    assert not torch.equal(fixed(images), other(images))
    other.load_state_dict(fixed.state_dict())
    assert torch.equal(fixed(images), other(images))
    reseeded = model(train="first", second_layer_seed=1)
    assert not torch.equal(fixed(images), reseeded(images))
