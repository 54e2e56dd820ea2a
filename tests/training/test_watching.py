"""A watch sees the batches of steps, and nothing else, and leaves no hook behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from fedsim.training.watching import Steps, watch_training


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))


def batches(count: int, size: int = 2) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        (torch.rand(size, 1, 8, 8, generator=drawn), torch.randint(3, (size,), generator=drawn))
        for _ in range(count)
    ]


def trained(data: list[tuple[Tensor, Tensor]], epochs: int = 1, most: int = 100) -> Steps:
    model, loss = net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer.param_groups[0]["own"] = 10**400  # no float holds it
    with watch_training(most) as steps:
        for _ in range(epochs):
            for images, labels in data:
                optimizer.zero_grad()
                loss(model(images), labels).backward()
                optimizer.step()
    return steps


def test_steps_are_what_the_model_was_called_with() -> None:
    data = batches(3)
    steps = trained(data)
    assert torch.equal(torch.stack(steps.images), torch.cat([images for images, _ in data]))
    assert steps.labels == torch.cat([labels for _, labels in data]).tolist()
    assert steps.sizes == [2, 2, 2]
    assert steps.order == [0, 1, 2, 3, 4, 5]
    assert steps.optimizer == "SGD"
    assert (steps.settings["lr"], steps.settings["momentum"]) == (0.1, 0.5)
    assert "own" not in steps.settings
    assert steps.training_mode


def test_images_beyond_the_bound_are_counted() -> None:
    steps = trained(batches(3), most=4)
    assert (len(steps.images), steps.left_out) == (4, 2)


def test_a_loss_that_nobody_learns_from_is_no_step() -> None:
    """A validation without `no_grad`, before each step and after the last one."""
    model, data = net(), batches(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_training(100) as steps:
        for images, labels in data[:2]:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            F.cross_entropy(model(data[2][0]), data[2][1])
            optimizer.step()
        F.cross_entropy(model(data[2][0]), data[2][1])
    assert torch.equal(torch.stack(steps.images), torch.cat([images for images, _ in data[:2]]))
    assert (steps.sizes, steps.factors, steps.unmodelled) == ([2, 2], [1.0, 1.0], [])


def test_what_no_attack_simulates_of_a_batch_is_noted() -> None:
    model, ((images, labels),) = net(), batches(1)
    with watch_training(100) as steps:
        logits = model(images)
        (F.cross_entropy(logits, labels) + F.cross_entropy(logits, 2 - labels)).backward()
    assert "several losses are taken of one batch" in steps.unmodelled
    with watch_training(100) as steps:
        twice = torch.cat([images[:1], images[:1]])
        F.cross_entropy(model(twice), labels[:1].repeat(2)).backward()
    assert steps.unmodelled == ["an image is more than once in a batch"]


def test_nothing_stays_behind_when_training_fails() -> None:
    before = F.cross_entropy, F.nll_loss, len(hooks._global_forward_hooks)
    with pytest.raises(RuntimeError), watch_training(100):
        net()(torch.zeros(1, 5, 8, 8))
    assert (F.cross_entropy, F.nll_loss, len(hooks._global_forward_hooks)) == before


def test_trainings_that_overlap_in_threads_are_told_apart() -> None:
    """The one that began first ends first, in the midst of the other."""
    began, ended = threading.Event(), threading.Event()
    loss = F.cross_entropy
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))

    def step(value: float) -> None:
        images = torch.full((1, 1, 2, 2), value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        F.cross_entropy(model(images), torch.tensor([1])).backward()
        optimizer.step()

    found: list[Steps] = []

    def later() -> None:
        with watch_training(10) as steps:
            step(2.0)
            began.set()
            assert ended.wait(20)
            step(3.0)
        found.append(steps)

    thread = threading.Thread(target=later)
    with watch_training(10) as first:
        thread.start()
        assert began.wait(20)
        step(1.0)
    ended.set()
    thread.join()
    assert [float(image.max()) for image in first.images] == [1.0]
    assert [float(image.max()) for image in found[0].images] == [2.0, 3.0]
    assert F.cross_entropy is loss


def watch(step: Any, make: Any = None, loss: Any = None, count: int = 3) -> Steps:
    """What is seen where `step` makes a number to differentiate of (model, loss, number)."""
    model, loss = net(), loss or nn.CrossEntropyLoss()
    optimizer = (make or (lambda model: torch.optim.SGD(model.parameters(), lr=0.5)))(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with watch_training(100) as steps:
        for number, (images, labels) in enumerate(batches(count, 4)):
            optimizer.zero_grad()
            step(model, loss(model(images), labels), number).backward()
            optimizer.step()
            schedule.step()
    return steps


def test_rates_are_those_of_each_step() -> None:
    steps = watch(lambda model, loss, number: loss)
    assert steps.rates == [0.5, 0.25, 0.125]
    assert (steps.factors, steps.unmodelled, steps.loss) == ([1.0] * 3, [], {})


@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.25), {"label_smoothing": 0.25}),
        (nn.NLLLoss(torch.tensor([1.0, 2, 3])), {"class_weights": [1.0, 2.0, 3.0]}),
    ],
)
def test_what_the_loss_has_is_seen(loss: nn.Module, seen: dict[str, Any]) -> None:
    steps = watch(lambda model, loss, number: loss, loss=loss)
    assert (steps.loss, steps.factors, steps.unmodelled) == (seen, [1.0] * 3, [])


@pytest.mark.parametrize(
    ("reduction", "step", "factor"),
    [
        ("sum", lambda model, loss, number: loss, 4.0),
        ("none", lambda model, loss, number: loss.mean(), 1.0),
        ("mean", lambda model, loss, number: loss / 2, 0.5),
    ],
)
def test_a_number_before_the_loss_is_seen(reduction: str, step: Any, factor: float) -> None:
    steps = watch(step, loss=nn.CrossEntropyLoss(reduction=reduction))
    assert steps.factors == pytest.approx([factor] * 3)
    assert not steps.unmodelled


def test_what_is_gathered_counts_as_often_as_there_are_batches() -> None:
    model, data = net(), batches(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_training(100) as steps:
        for images, labels in data:
            F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert (steps.sizes, steps.factors) == ([4], [2.0])


@pytest.mark.parametrize(
    "step",
    [
        lambda model, loss, number: loss + 0.01 * sum(p.abs().sum() for p in model.parameters()),
        lambda model, loss, number: loss**2,
        lambda model, loss, number: loss + 0.1 * number**3,
    ],
    ids=["penalty", "focal", "from the second step on, but no proximal term"],
)
def test_what_else_is_differentiated_is_noted(step: Any) -> None:
    assert len(watch(step).unmodelled) == 1


def test_a_proximal_term_is_seen() -> None:
    start = [p.detach().clone() for p in net().parameters()]

    def step(model: nn.Module, loss: Tensor, number: int) -> Tensor:
        moved = zip(model.parameters(), start, strict=True)
        return loss + 0.2 * torch.stack([(p - q).square().sum() for p, q in moved]).sum()

    steps = watch(step, count=4)
    assert steps.proximal == pytest.approx(0.4, rel=0.01)
    assert not steps.unmodelled


def test_groups_of_parameters_are_noted_and_betas_seen() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.1}, {"params": others}]
        return torch.optim.AdamW(groups, lr=0.2, betas=(0.5, 0.75))

    steps = watch(lambda model, loss, number: loss, make=make)
    assert len(steps.unmodelled) == 1
    assert (steps.settings["beta1"], steps.settings["beta2"]) == (0.5, 0.75)


def per_sample() -> None:
    model, ((images, labels),) = net(), batches(1)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, weights, (image[None],))
        return F.cross_entropy(outputs, label[None])

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, images, labels)
    for name, p in model.named_parameters():
        p.grad = found[name].mean(0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_fault_of_the_watch_does_not_reach_the_training() -> None:
    with watch_training(100) as steps:
        per_sample()
    assert steps.failure and not steps.images


class Loss(nn.Module):
    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels)


@pytest.mark.filterwarnings("ignore")
def test_a_loss_can_be_compiled_while_it_is_watched() -> None:
    model, ((images, labels),) = net(), batches(1)
    outputs = model(images).detach()
    expected = F.cross_entropy(outputs, labels)
    with watch_training(100) as steps:
        scripted = torch.jit.script(Loss())
        compiled = torch.compile(Loss(), backend="eager", fullgraph=True)
        assert torch.equal(scripted(outputs, labels), expected)
        assert torch.equal(compiled(outputs, labels), expected)
    assert steps.failure is None


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_examples_are_no_truth(reduction: str, weighted: bool) -> None:
    model, ((images, labels),) = net(), batches(1, 4)
    weights = torch.tensor([1.0, 2, 3]) if weighted else None
    loss = nn.CrossEntropyLoss(weights, ignore_index=255, reduction=reduction)
    labels[0] = 255
    with watch_training(100) as steps:
        loss(model(images), labels).mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    kept = float(3 if weights is None else weights[labels[1:]].sum())
    assert torch.equal(torch.stack(steps.images), images[1:])
    assert (steps.labels, steps.unmodelled) == (labels[1:].tolist(), [])
    assert steps.factors == pytest.approx([{"mean": 1.0, "sum": kept, "none": kept / 4}[reduction]])


@pytest.mark.parametrize("early", [False, True])
def test_what_a_scaler_multiplies_by_is_taken_back(early: bool) -> None:
    """The step whose gradients overflow is left out, as the scaler leaves it out."""
    model, data = net(), batches(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with watch_training(100) as steps:
        for number, (images, labels) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images * 1e9 if number == 0 else images), labels)
            scaler.scale(loss).backward()
            if early:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert (steps.sizes, steps.factors, steps.unmodelled) == ([2, 2], [1.0, 1.0], [])
