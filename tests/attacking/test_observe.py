"""Anybody's model and update: taken apart, attacked, scored against a truth that is handed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedsim
from fedsim.contracts.attack import AttackFailed
from fedsim.models.victim import rebuild
from fedsim.types import FedsimError, Observation

SHAPE, CLASSES = (1, 8, 8), 5
MEAN, STD = (0.4,), (0.25,)
Batch = tuple[Tensor, Tensor]
"""Images and their labels."""


class Net(nn.Module):
    """As users write them: a batch norm, a dropout, a classifier that has a name of its own."""

    def __init__(self, answer: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.act = nn.Sigmoid()
        self.drop = nn.Dropout(0.5)
        self.classifier = nn.Linear(6 * 64, CLASSES)
        self.answer = answer

    def forward(self, images: Tensor) -> Any:
        hidden = self.act(self.norm(self.conv(images)))
        return self.answer(self.classifier(self.drop(hidden.flatten(1))))


@pytest.fixture
def batch() -> Batch:
    stream = torch.Generator().manual_seed(5)
    coarse = torch.rand(2, 1, 3, 3, generator=stream)
    smooth = F.interpolate(coarse, size=SHAPE[1:], mode="bilinear", align_corners=True)
    return smooth, torch.tensor([3, 1])


def built(answer: Callable[[Tensor], Any] = lambda logits: logits) -> Net:
    torch.manual_seed(0)
    return Net(answer)


def trained(
    model: nn.Module, images: Tensor, labels: Tensor, loss: Any = None
) -> dict[str, Tensor]:
    """The gradient of what needs one, in evaluation mode."""
    like = next(model.parameters())
    answer: Any = model.eval()(((images - MEAN[0]) / STD[0]).to(like.dtype))
    value = (loss or F.cross_entropy)(getattr(answer, "logits", answer), labels)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    return {name: each for name, each in zip(named, found, strict=True) if each is not None}


def seen(model: nn.Module, update: Any, **changes: Any) -> Observation:
    given: dict[str, Any] = {
        "input_shape": SHAPE,
        "classes": CLASSES,
        "batch_size": 2,
        "mean": MEAN,
        "std": STD,
        "mode": "eval",
    }
    return fedsim.observe(model, update, **{**given, **changes})


def test_the_copy_computes_what_the_model_does_and_the_model_stays(batch: Batch) -> None:
    model = built()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    observation = seen(model, trained(model, *batch))
    copy = rebuild(observation).eval()
    images = torch.rand(3, *SHAPE)
    assert torch.allclose(copy(images), model.eval()(images), atol=1e-6)
    assert copy.features(images).shape == (3, 6 * 64)
    assert set(observation.update) == set(observation.parameters)
    assert {"head.weight", "head.bias", "body.module.conv.weight"} <= set(observation.update)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.drop.p == 0.5
    copy.train()  # in which the model would draw a mask each time
    assert torch.equal(copy(images), copy(images))


def test_labels_and_images_are_recovered_and_scored(batch: Batch) -> None:
    model = built()
    images, labels = batch[0][:1], batch[1][:1]
    observation = seen(model, trained(model, images, labels), batch_size=1)
    _, row = fedsim.attack(observation, "label_inference", truth=(images, labels))
    assert row["metrics"]["label_accuracy"] == 1.0
    found, row = fedsim.attack(
        observation, "deep_leakage", {"iterations": 300}, truth=(images, labels)
    )
    assert row["metrics"]["psnr"] > 50
    assert row["server"] == "honest"
    assert found.images is not None and found.images.shape == images.shape
    assert fedsim.attack(observation, "label_inference")[1]["metrics"] is None


def test_a_classifier_that_is_no_linear_layer_is_all_body(batch: Batch) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, CLASSES, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    observation = seen(model, trained(model, *batch))
    assert all(name.startswith("body.") for name in observation.update)
    assert require_images(observation, batch)["metrics"]["psnr"] is not None


def test_what_follows_the_last_linear_layer_stays_part_of_the_body(batch: Any) -> None:
    """A temperature behind it: logits are not its output, so that it is no head."""
    model = built(lambda logits: logits / 2)
    assert "body.module.classifier.weight" in seen(model, trained(model, *batch)).update
    with pytest.raises(FedsimError, match="not the output of classifier"):
        seen(model, trained(model, *batch), head="classifier")


def test_frozen_and_unused_parameters_may_be_left_out(batch: Batch) -> None:
    model = built()
    model.idle = nn.Linear(2, 2)
    model.conv.requires_grad_(False)
    update = {
        name: value
        for name, value in trained(built(), *batch).items()
        if not name.startswith("conv")
    }
    observation = seen(model, update)
    assert not any("idle" in name or "conv" in name for name in observation.parameters)
    rebuilt = rebuild(observation)
    assert torch.equal(rebuilt.state_dict()["body.module.conv.weight"], model.conv.weight)


def test_a_frozen_parameter_that_moved_is_not_called_absent(batch: Batch) -> None:
    model = plain()
    update = trained(model, *batch)
    model.hidden.requires_grad_(False)
    with pytest.raises(FedsimError, match=r"update\.hidden\.weight: .*frozen"):
        seen(model, update)


def test_a_model_that_cuts_gradients_to_its_images_is_named(batch: Batch) -> None:
    class Cut(Plain):
        cut: Any = staticmethod(torch.no_grad)

        def forward(self, images: Tensor) -> Tensor:
            with self.cut():
                hidden = self.hidden(images.flatten(1)).sigmoid()
            logits: Tensor = self.classifier(hidden.clone())
            return logits

    torch.manual_seed(0)
    model = Cut()
    for model.cut in (torch.no_grad, torch.inference_mode):
        observation = seen(model, trained(model, *batch))
        assert labels_of(observation, batch) == 1.0
        for name in ("inverting_gradients", "factored_inversion"):
            with pytest.raises(FedsimError, match="cuts gradients"):
                fedsim.attack(observation, name, {"iterations": 2}, truth=batch)
    model.forward = torch.no_grad()(model.forward)  # type: ignore[method-assign]
    with pytest.raises(FedsimError, match="cuts all gradients"):
        seen(model, {name: torch.ones_like(p) for name, p in model.named_parameters()})


def test_a_model_may_write_to_its_images(batch: Batch) -> None:
    class Writing(Plain):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.clamp_(-9, 9))

    torch.manual_seed(0)
    model = Writing()
    assert labels_of(seen(model, trained(model, *batch)), batch) == 1.0


def test_tensors_without_names_are_in_the_order_of_the_parameters(batch: Batch) -> None:
    model = built()
    model.idle = nn.Linear(2, 2)
    model.conv.bias.requires_grad_(False)
    named = {n: v for n, v in trained(built(), *batch).items() if n != "conv.bias"}
    wanted = seen(model, named).update
    every = [named.get(name) for name, _ in model.named_parameters()]  # None: allow_unused=True
    needed = [named.get(name) for name, p in model.named_parameters() if p.requires_grad]
    assert len(every) == len(needed) + 1
    for unnamed in (tuple(every), needed, iter(every)):
        update = seen(model, unnamed).update
        assert set(update) == set(wanted)
        assert all(torch.equal(update[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 4}, r"expected logits of shape \(B, 4\)"),
        ({"classes": 1}, "classes: expected at least 2"),
        ({"input_shape": (3, 8, 8)}, "does not take images"),
        ({"input_shape": (8, 8)}, r"input_shape: expected \(C, H, W\)"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
        ({"mean": (0.1, 0.2)}, "mean: expected 1 finite number"),
        ({"std": (0.0,)}, "std: expected numbers above 0"),
        ({"mode": "training"}, "mode: expected train or eval"),
        ({"algorithm": "sgd"}, "algorithm: expected fedsgd or fedavg"),
        ({"local": {"steps": 2}}, "a gradient has no local steps"),
        ({"algorithm": "fedavg"}, "local: steps is missing"),
        ({"algorithm": "fedavg", "local": {"stepz": 1}}, "did you mean 'steps'"),
        ({"algorithm": "fedavg", "local": {"steps": 0, "lr": 1}}, "local.steps: expected"),
        ({"algorithm": "fedavg", "local": {"steps": 1, "lr": 0}}, "local.lr: expected"),
        ({"head": "conv"}, "head: conv is no linear layer with 5 outputs"),
        ({"buffers": {"norm.mean": torch.zeros(6)}}, "buffers: the model has no"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    changes: dict[str, Any], message: str, batch: Batch
) -> None:
    model = built()
    with pytest.raises(FedsimError, match=message):
        seen(model, trained(model, *batch), **changes)


def _without(update: dict[str, Tensor]) -> dict[str, Tensor]:
    del update["conv.bias"]
    return update


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, "1 parameter of the model missing: conv.bias"),
        (lambda u: {**u, "conv.wieght": u["conv.weight"]}, "did you mean 'conv.weight'"),
        (lambda u: {**u, "conv.bias": torch.zeros(7)}, r"conv.bias: expected a tensor of shape"),
        (lambda u: {**u, "conv.bias": u["conv.bias"] * torch.nan}, "holds NaN"),
        (lambda u: list(u.values())[1:], "expected 6 tensors in the order .*, got 5 tensors"),
        (lambda u: list(u.values())[::-1], r"conv.weight: expected a tensor of shape"),
        (lambda u: u["conv.bias"], "to tensors, got Tensor"),
        (lambda u: None, "to tensors, got NoneType"),
    ],
)
def test_updates_of_another_model_are_refused(
    change: Callable[[dict[str, Tensor]], Any], message: str, batch: Batch
) -> None:
    model = built()
    with pytest.raises(FedsimError, match=message):
        seen(model, change(trained(model, *batch)))


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ((torch.rand(3, *SHAPE), torch.tensor([1, 2, 3])), "truth: images: expected shape"),
        ((torch.rand(2, *SHAPE) * 2, torch.tensor([1, 2])), "before normalization"),
        ((torch.rand(2, *SHAPE), torch.tensor([1.0, 2.0])), "labels: expected 2 integers"),
        ((torch.rand(2, *SHAPE), torch.tensor([1, 5])), "labels: expected 0 to 4"),
    ],
)
def test_truths_that_are_none(truth: Batch, message: str, batch: Batch) -> None:
    model = built()
    with pytest.raises(FedsimError, match=message):
        fedsim.attack(seen(model, trained(model, *batch)), "label_inference", truth=truth)


def test_tied_weights_are_refused() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, CLASSES)
    )
    model[2].weight = model[1].weight
    with pytest.raises(FedsimError, match="tied weights"):
        seen(model, {})


class Plain(nn.Module):
    """A body of two layers and a classifier, of which parts are frozen or exchanged."""

    def __init__(self, finish: Callable[[Tensor], Tensor] = lambda logits: logits) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 24)
        self.classifier: nn.Module = nn.Linear(24, CLASSES)
        self.finish = finish

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.dropout(self.hidden(images.flatten(1)).sigmoid(), 0.5, self.training)
        return self.finish(self.classifier(hidden))


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, features: Tensor) -> Any:
        return self.base_layer(features) + self.lora_B["default"](self.lora_A["default"](features))


def plain(finish: Callable[[Tensor], Tensor] = lambda logits: logits) -> Plain:
    torch.manual_seed(0)
    return Plain(finish)


def labels_of(observation: Observation, batch: Batch) -> float:
    _, row = fedsim.attack(observation, "label_inference", truth=batch)
    return float(row["metrics"]["label_accuracy"])


def require_images(observation: Observation, batch: Batch) -> dict[str, Any]:
    """Run an attack that differentiates the model in its images; returns the row."""
    found, row = fedsim.attack(
        observation,
        "inverting_gradients",
        {"iterations": 2},
        grant=fedsim.Grant(labels="known"),
        truth=batch,
    )
    assert found.images is not None
    return row


def test_the_classifier_before_a_log_softmax_is_the_head(batch: Batch) -> None:
    model = plain(lambda logits: logits.log_softmax(1))
    observation = seen(model, trained(model, *batch, loss=F.nll_loss))
    assert "head.weight" in observation.update
    assert labels_of(observation, batch) == 1.0
    model = plain(lambda logits: logits.softmax(1))
    assert "head.weight" not in seen(model, trained(model, *batch)).update


@pytest.mark.parametrize("frozen", ["classifier", "classifier.weight", "hidden", "classifier.bias"])
def test_labels_with_a_part_that_is_not_trained(frozen: str, batch: Batch) -> None:
    model = plain()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    observation = seen(model, trained(model, *batch))
    if frozen == "classifier":
        with pytest.raises(AttackFailed, match="not trained, or is not sent"):
            labels_of(observation, batch)
    else:
        assert labels_of(observation, batch) == 1.0
    require_images(observation, batch)


def test_labels_through_low_rank_layers_on_the_classifier(batch: Batch) -> None:
    model = plain()
    assert isinstance(model.classifier, nn.Linear)
    model.classifier = LowRank(model.classifier)
    model.hidden.requires_grad_(False)
    update = trained(model, *batch)
    sent = {  # as PEFT names what it saves
        "base_model.model." + name.replace(".default", ""): value for name, value in update.items()
    }
    observation = seen(model, sent)
    assert set(observation.update) == {"head.lora_A.default.weight", "head.lora_B.default.weight"}
    assert labels_of(observation, batch) == 1.0


class Beside(Plain):
    """A branch that starts as if it were not there, beside or behind the classifier."""

    def __init__(self, branch: str) -> None:
        super().__init__()
        self.branch = branch
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(CLASSES))
        self.down = nn.Parameter(torch.randn(2, 24))
        self.up = nn.Parameter(torch.zeros(CLASSES, 2))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.hidden(images.flatten(1)).sigmoid()
        logits: Tensor = self.classifier(hidden)
        if self.branch == "scale":
            return logits * self.scale
        if self.branch == "shift":
            return logits + self.shift
        return logits + hidden @ self.down.T @ self.up.T


@pytest.mark.parametrize(
    ("branch", "names"), [("scale", ["scale"]), ("shift", ["shift"]), ("low-rank", ["down", "up"])]
)
def test_a_branch_that_starts_as_nothing_is_part_of_the_model(
    branch: str, names: list[str], batch: Batch
) -> None:
    torch.manual_seed(0)
    model = Beside(branch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    observation = seen(model, trained(model, *batch))
    assert {f"body.module.{name}" for name in names} <= set(observation.update)
    assert all(torch.equal(observation.parameters[f"body.module.{n}"], before[n]) for n in names)
    for parameter in (model.scale, model.shift, model.down, model.up):
        parameter.requires_grad_(False)  # no update moves it: the classifier alone is the head
    assert "head.weight" in seen(model, trained(model, *batch)).update


def test_a_model_may_compute_in_a_precision_of_its_own(batch: Batch) -> None:
    class Mixed(Plain):
        def forward(self, images: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(images)

    torch.manual_seed(0)
    for model in (Mixed(), Plain(Tensor.double)):
        observation = seen(model, trained(model, *batch))
        require_images(observation, batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype, batch: Batch) -> None:
    model = plain().to(dtype)
    observation = seen(model, trained(model, *batch))
    assert {value.dtype for value in observation.update.values()} == {torch.float32}
    assert labels_of(observation, batch) == 1.0
    row = require_images(observation, batch)
    assert row["simulation_error"] < (0.1 if dtype == torch.bfloat16 else 1e-5)
    assert next(model.parameters()).dtype == dtype


@pytest.mark.parametrize("prefix", ["module.", "base_model.model.", "_orig_mod."])
def test_prefixes_are_taken_off(prefix: str, batch: Batch) -> None:
    model = plain()
    update = trained(model, *batch)
    wanted = seen(model, update).update
    found = seen(model, {prefix + name: value for name, value in update.items()}).update
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_names_of_several_parts_are_refused(batch: Batch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 5))
    model[1].requires_grad_(False)
    one = {"weight": torch.zeros(64, 64), "bias": torch.zeros(64)}
    with pytest.raises(FedsimError, match="several parts"):
        seen(model, one)


def test_a_difference_of_state_dicts_is_an_update() -> None:
    model = built().eval()
    with torch.no_grad():
        difference = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    observation = seen(model, difference, algorithm="fedavg", local={"steps": 1, "lr": 0.1})
    assert not any("running" in name for name in observation.update)
    mean = observation.buffers_update["body.module.norm.running_mean"]
    before = model.norm.running_mean
    assert before is not None
    assert torch.equal(mean, before + 1)


def test_random_layers_are_left_out_or_drawn_once(batch: Batch) -> None:
    class Noisy(Plain):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images + torch.randn_like(images) * self.training)

    torch.manual_seed(0)
    for model in (plain(), Noisy()):
        copy = rebuild(seen(model, trained(model, *batch))).train()
        before = torch.get_rng_state()
        assert torch.equal(copy(batch[0]), copy(batch[0]))
        assert torch.equal(torch.get_rng_state(), before)


def test_the_classifier_may_be_called_before_another_output(batch: Batch) -> None:
    class Two(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(CLASSES, CLASSES)

        def forward(self, images: Tensor) -> Any:
            logits = super().forward(images)
            return logits, self.other(logits)

    torch.manual_seed(0)
    model = Two()
    update = trained(model, *batch, loss=lambda answer, labels: F.cross_entropy(answer[0], labels))
    assert labels_of(seen(model, update), batch) == 1.0


def test_modules_of_torch_jit_are_refused() -> None:
    model = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)))
    with pytest.raises(FedsimError, match=r"torch\.jit"):
        seen(model, {})


def test_attention_and_dropped_paths_have_no_masks() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
            self.out = nn.Linear(64, CLASSES)

        def forward(self, images: Tensor) -> Tensor:
            rows = images[:, 0]
            kept = rows.new_empty(len(rows), 1, 1).bernoulli_(0.5).div_(0.5)
            rows = rows + self.attend(rows, rows, rows)[0] * (kept if self.training else 1)
            mixed = F.scaled_dot_product_attention(
                rows, rows, rows, dropout_p=0.5 if self.training else 0.0
            )
            logits: Tensor = self.out(mixed.flatten(1))
            return logits

    torch.manual_seed(0)
    model = Attending()
    update = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    copy, images = rebuild(seen(model, update)), torch.rand(2, *SHAPE)
    torch.testing.assert_close(copy.train()(images), model.eval()(images))


def test_the_simulated_update_tells_of_a_training_that_is_not_modelled(batch: Batch) -> None:
    model = plain()
    update = trained(model, *batch)
    right, wrong = (
        fedsim.attack(seen(model, each), "label_inference", truth=batch)[1]["simulation_error"]
        for each in (update, {n: v + model.state_dict()[n] for n, v in update.items()})
    )
    assert right < 1e-5
    assert wrong > 0.1
    assert fedsim.attack(seen(model, update), "label_inference")[1]["simulation_error"] is None


def test_the_update_is_simulated_where_no_batch_is_a_share_of_the_images(batch: Batch) -> None:
    """Two images, of which each of three steps has both."""
    model, lr = plain().eval(), 0.05
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        for name, slope in trained(model, *batch).items():
            model.get_parameter(name).data -= lr * slope
    update = {name: value - start[name] for name, value in model.state_dict().items()}
    model.load_state_dict(start)
    right, wrong = (
        fedsim.attack(
            seen(
                model, update, algorithm="fedavg", local={"steps": 3, "lr": each, "batches": "same"}
            ),
            "label_inference",
            truth=batch,
        )[1]["simulation_error"]
        for each in (lr, 100 * lr)
    )
    assert right < 1e-5
    assert wrong > 0.1
