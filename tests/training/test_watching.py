"""A watch sees the batches of steps, and nothing else, and leaves no hook behind."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from fedsim.training.watching import Steps, watched


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
    with watched(most) as steps:
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
    assert steps.training_mode


def test_an_image_that_returns_is_kept_once() -> None:
    steps = trained(batches(2), epochs=3)
    assert len(steps.images) == 4
    assert steps.order == [0, 1, 2, 3] * 3
    assert len(steps.sizes) == 6


def test_images_beyond_the_bound_are_counted() -> None:
    steps = trained(batches(3), most=4)
    assert (len(steps.images), steps.left_out) == (4, 2)


def test_evaluation_is_not_seen() -> None:
    model, ((images, labels),) = net(), batches(1)
    with watched(100) as steps, torch.no_grad():
        F.cross_entropy(model(images), labels)
    assert not steps.sizes


def test_gradients_that_are_gathered_make_one_step() -> None:
    model, data = net(), batches(2)
    optimizer = torch.optim.Adam(model.parameters())
    with watched(100) as steps:
        for images, labels in data:
            F.nll_loss(F.log_softmax(model(images), 1), labels).backward()
        optimizer.step()
    assert (steps.sizes, steps.optimizer) == ([4], "Adam")


def test_a_gradient_without_an_optimizer_is_a_step() -> None:
    model, ((images, labels),) = net(), batches(1)
    with watched(100) as steps:
        F.cross_entropy(model(images), labels).backward()
    assert (steps.sizes, steps.optimizer) == ([2], None)


def test_what_prepares_images_is_not_the_model() -> None:
    model, ((images, labels),) = net(), batches(1)
    with watched(100) as steps:
        F.cross_entropy(model(nn.ReflectionPad2d(0)(images * 2)), labels).backward()
    assert torch.equal(torch.stack(steps.images), images * 2)


def test_other_threads_are_not_seen() -> None:
    with watched(100) as steps:
        thread = threading.Thread(target=_train_plainly)
        thread.start()
        thread.join()
    assert not steps.sizes


def _train_plainly() -> None:
    model, ((images, labels),) = net(), batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def test_nothing_stays_behind_when_training_fails() -> None:
    before = F.cross_entropy, F.nll_loss, len(hooks._global_forward_hooks)
    with pytest.raises(RuntimeError), watched(100):
        net()(torch.zeros(1, 5, 8, 8))
    assert (F.cross_entropy, F.nll_loss, len(hooks._global_forward_hooks)) == before


def test_a_forward_that_fails_does_not_hide_the_next() -> None:
    model, ((images, labels),) = net(), batches(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(100) as steps:
        with pytest.raises(RuntimeError):
            model(torch.zeros(1, 5, 8, 8))
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert torch.equal(torch.stack(steps.images), images)
