"""Models that somebody has built, taken apart into body and head; copies live with the process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedsim.models.base import Classifier
from fedsim.types import FedsimError, Mode

_TRIED = 2
"""Number of images on which a taken-apart model is compared with the original."""
_RELUS = (F.relu, torch.relu, Tensor.relu)
_POOLS = (F.max_pool2d, torch.max_pool2d)
_MASKS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.feature_dropout,
    torch.alpha_dropout,
)
_AXES = 4
_POSITION = 4
"""Position of `dropout_p` among the arguments of scaled_dot_product_attention."""
_PREFIX = "live:"
_numbers = itertools.count(1)
_models: dict[str, Classifier] = {}


def keep(model: Classifier, kind: str) -> str:
    """Keeps `model` itself, of class name `kind`; returns the name by which `again` copies it."""
    name = f"{_PREFIX}{kind}-{next(_numbers)}"
    _models[name] = model
    return name


def is_live(name: str) -> bool:
    """Returns whether `name` has the form of the names that `keep` returns."""
    return name.startswith(_PREFIX)


def copy_for_processes(name: str) -> Mapping[str, Classifier]:
    """Returns {name: a copy of the model kept as `name`}, for `adopt`; errors as of `again`."""
    return {name: again(name)}


def adopt(models: Mapping[str, Classifier]) -> None:
    """Keeps models of another process's `copy_for_processes`, by name; equal names are replaced."""
    _models.update(models)


def again(name: str) -> Classifier:
    """Returns a deep copy of the model kept as `name`; a FedsimError if this process has none."""
    if name not in _models:
        raise FedsimError(
            f"{name}: this model was handed to fedsim.observe in another process (or to fedsim "
            "assess), and has no plugin from which it could be built: call fedsim.observe again"
        )
    return copy.deepcopy(_models[name])


def take_apart(
    model: nn.Module, input_shape: tuple[int, int, int], classes: int, head: str | None = None
) -> tuple[Classifier, Mapping[str, str]]:
    """Returns a copy of `model` as body and head, and the model's tensor names -> the copy's.

    The head is the linear layer of `classes` outputs whose output, or the log-softmax of it, is
    what the model returns. Otherwise it is a part of several layers that is linear as a whole, such
    as a layer with a low-rank layer beside it. A model without either is all body, and its head the
    identity. The copy is in float32 without dropout; what it still draws is the same each time.

    Args:
        model: Takes (B, C, H, W) and returns logits (B, K), something with `logits`, or a tuple
            that begins with them. What `copy.deepcopy` cannot copy is a TypeError.
        input_shape: (C, H, W).
        classes: K, the number of classes.
        head: Name of the head's layer; None looks for it as above.

    Raises:
        FedsimError: the model cannot be copied, does not take such images or has other outputs, a
            parameter has two names, or `head` is no linear layer that can be taken off.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise FedsimError("model: expected modules of Python, got some of torch.jit")
    try:
        own = copy.deepcopy(model).float()
    except RuntimeError as error:
        raise FedsimError(
            f"model: it cannot be copied: {error}; hand it over before it has computed anything"
        ) from error
    _prepare(own)
    whole = _Logits(own)
    probe = _probe(own, input_shape)
    expected, called = _trace(whole, probe)
    if expected.shape != (_TRIED, classes):
        raise FedsimError(
            f"model: expected logits of shape (B, {classes}), got "
            f"{tuple(expected.shape)[:1] and ('B', *tuple(expected.shape)[1:])}: check classes"
        )
    named = list(own.named_parameters(remove_duplicate=False))
    if len(named) > len(list(own.parameters())):
        raise FedsimError(
            "model: a parameter has two names (tied weights), and no update tells which is meant"
        )
    whole.seeded = _is_random(whole, probe)
    if head is not None and not _is_head(own, head, classes):
        raise FedsimError(
            f"head: {head} is no linear layer with {classes} outputs of the model, or its weight "
            "is made of others (weight_norm); name one that is, or none"
        )
    # The head is a candidate with which body and head answer as the whole did, at moved weights.
    with _move_weights(own), torch.no_grad():
        expected = whole.eval()(probe)
        for layer in [head] if head else _head_candidates(own, called, classes):
            parent, _, last = layer.rpartition(".")
            linear = own.get_submodule(layer)
            # Once the layer is replaced, the model no longer lists its tensors.
            names = _map_names(own, layer)
            setattr(own.get_submodule(parent), last, _HeadReached())
            found = Classifier(whole, linear)
            try:
                parted: Tensor | None = found.eval()(probe)
            except Exception:  # features are not all that the layer is called with
                parted = None
            is_answer = parted is not None and parted.shape == expected.shape
            answers = [parted, parted.log_softmax(1)] if parted is not None and is_answer else []
            if any(_alike(each, expected) for each in answers):
                return found, names
            setattr(own.get_submodule(parent), last, linear)
    if head is not None:
        raise FedsimError(f"head: what the model returns is not the output of {head}")
    return Classifier(whole, nn.Identity()), _map_names(own, None)


def is_random(model: Classifier) -> bool:
    """Returns whether a model from `take_apart` draws random numbers: the same ones each time."""
    return isinstance(model.body, _Logits) and model.body.seeded


def find_unused(model: Classifier, mode: Mode, input_shape: tuple[int, int, int]) -> set[str]:
    """Returns the names of parameters on which logits of images `input_shape` do not depend.

    The model is left in `mode`, its parameters requiring gradients. If a model of `take_apart` cuts
    gradients to its images, later passes that need them raise a FedsimError.

    Raises:
        FedsimError: the model's own code cuts all gradients, or it does not take such images.
    """
    images = _probe(model, input_shape).requires_grad_()
    model.train(mode == "train")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    named = [(name, p.requires_grad_()) for name, p in model.named_parameters()]
    wanted = [images, *(p for _, p in named)]
    logits = _answer(model, images.clone())  # no leaf, so that they may be written to
    if not logits.requires_grad:
        raise FedsimError("model: its own code cuts all gradients, so that it has no update")
    # One backward pass tells it for all: the gradient of an unused tensor is None.
    of_images, *found = torch.autograd.grad(logits.sum(), wanted, allow_unused=True)
    model.load_state_dict(before, strict=False)
    if isinstance(model.body, _Logits):
        model.body.cut = of_images is None
    return {name for (name, _), gradient in zip(named, found, strict=True) if gradient is None}


class _Hardsigmoid(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu6(inputs + 3) / 6


class _Hardswish(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * F.relu6(inputs + 3) / 6


def _prepare(model: nn.Module) -> None:
    """Makes a copy fit for attacks: no masks, nothing in place, all differentiable twice."""
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.dropout = 0.0
        if getattr(part, "inplace", False):
            setattr(part, "inplace", False)  # noqa: B010 - of a module of any kind
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Hardsigmoid):
                setattr(part, name, _Hardsigmoid())
            elif isinstance(child, nn.Hardswish):
                setattr(part, name, _Hardswish())


class _Substitutes(TorchFunctionMode):
    """Exchanges functions that a model calls for what attacks can work with.

    `view` becomes `reshape`, since attacks lay images out in memory as is fastest. ReLU and max
    pooling become modules, which attacks look for. Masks are left out, and `bernoulli` is its mean.
    """

    def __init__(self, modules: nn.ModuleDict, *, adding: bool) -> None:
        super().__init__()
        self._modules, self._adding = modules, adding

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # view(dtype) reinterprets the bits, which reshape cannot.
        if func is Tensor.view and not any(isinstance(each, torch.dtype) for each in args):
            return args[0].reshape(*args[1:])
        named = dict(kwargs or {})
        if func in _MASKS:
            return args[0] if args else named["input"]
        if func is Tensor.bernoulli_:
            return args[0].fill_(args[1] if len(args) > 1 else named.get("p", 0.5))
        if func is torch.bernoulli and len(args) == 1:
            return args[0]
        if func is F.scaled_dot_product_attention:
            if len(args) > _POSITION:
                args = (*args[:_POSITION], 0.0, *args[_POSITION + 1 :])
            else:
                named["dropout_p"] = 0.0
        substitute = self._substitute(func, args, named)
        return substitute(args[0]) if substitute else func(*args, **named)

    def _substitute(
        self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> nn.Module | None:
        """Returns the module that computes what `func` does; None if there is none."""
        if func in _RELUS and args:
            key = "relu"
            made: nn.Module = nn.ReLU()
        # After dilation, function and module order their arguments differently.
        elif func in _POOLS and args and args[0].ndim == _AXES and len(args) <= _AXES + 1:
            if named.get("return_indices"):
                return None
            # ModuleDict refuses dots in a key.
            key = f"max_pool {args[1:]} {named}".replace(".", "_")
            made = nn.MaxPool2d(*args[1:], **named)
        else:
            return None
        if key not in self._modules:
            if not self._adding:
                return None
            self._modules[key] = made
        return self._modules[key]


class _FeaturesReached(BaseException):
    """A model calls its head. Not an `Exception`, which its code may catch."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


class _HeadReached(nn.Module):
    """Takes the head's place and raises what it is called with, the features."""

    def forward(self, features: Tensor) -> Tensor:
        raise _FeaturesReached(features)


class _Logits(nn.Module):
    """Wraps a model so that it returns its logits, whatever they come wrapped in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.functions = nn.ModuleDict()
        """Modules that replace functions the model calls, such as ReLU."""
        self.adding = False
        """Whether a function without such a module gets one."""
        self.seeded = False
        """Whether each pass draws its random numbers from the same seed."""
        self.cut = False
        """Whether the model's own code cuts gradients to the images."""

    def forward(self, images: Tensor) -> Tensor:
        if self.cut and images.requires_grad and torch.is_grad_enabled():
            raise FedsimError(
                "the model's own code cuts gradients to its input (torch.no_grad, inference_mode "
                "or detach), and an attack that compares updates needs them: freeze parameters "
                "by requires_grad_(False) instead, which leaves the client's update as it is"
            )
        substitutes = _Substitutes(self.functions, adding=self.adding)
        # Of other kernels of attention, no second derivative is known.
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self.seeded:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.manual_seed(0)
            stack.enter_context(substitutes)
            try:
                answer: Any = self.module(images)
            except _FeaturesReached as reached:
                answer = reached.features
        answer = getattr(answer, "logits", answer)
        answer = answer[0] if isinstance(answer, tuple) else answer
        # A model's own code may compute in another precision than that of its images.
        return cast(Tensor, answer.to(images.dtype) if isinstance(answer, Tensor) else answer)


def _probe(model: nn.Module, input_shape: tuple[int, int, int]) -> Tensor:
    like = next(model.parameters(), None)
    if like is None:
        raise FedsimError("model: it has no parameters, and so no update")
    shape = (_TRIED, *input_shape)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(device=like.device, dtype=like.dtype)


def _trace(model: _Logits, images: Tensor) -> tuple[Tensor, list[str]]:
    """Returns the logits, and the names of the modules in the order in which their calls end."""
    called: list[str] = []
    hooks = [
        part.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, part in model.module.named_modules()
    ]
    model.adding = True
    try:
        # In eval mode no call changes the user's batch norm statistics.
        with torch.no_grad():
            logits: Any = _answer(model.eval(), images)
    finally:
        model.adding = False
        for hook in hooks:
            hook.remove()
    if not isinstance(logits, Tensor):
        raise FedsimError(
            f"model: expected logits, or something that has `logits`, got {type(logits).__name__}"
        )
    return logits, called


def _answer(model: nn.Module, images: Tensor) -> Any:
    """Returns the output of somebody's model for `images`; refuses one that fails on them."""
    try:
        return model(images)
    except FedsimError:
        raise
    except Exception as error:  # somebody else's code, of any kind
        raise FedsimError(
            f"model: it does not take images of shape {tuple(images.shape)}: "
            f"{type(error).__name__}: {error}; a model is tried with {_TRIED} images and has to "
            "take batches of any size"
        ) from error


@contextmanager
def _move_weights(model: nn.Module) -> Iterator[None]:
    """Moves all trained weights a little inside the block, so that every part has an effect.

    Low-rank layers start at 0 and scales at 1, where the wrong head would compute the same.
    """
    stream = torch.Generator().manual_seed(0)
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    before = [p.detach().clone() for p in trained]
    with torch.no_grad():
        for p in trained:
            # Drawn numbers lie in [1, 2): zeros move by at least 0.01, all others by at least 5%.
            drawn = torch.rand(p.shape, generator=stream).add_(1).to(p)
            p.copy_(torch.where(p == 0, 0.01 * drawn, p * (1 + 0.05 * drawn)))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(trained, before, strict=True):
                p.copy_(value)


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def _is_random(model: _Logits, images: Tensor) -> bool:
    """Whether two passes in training mode differ; statistics stay as they are."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            one = model.train()(images)
            model.load_state_dict(before, strict=False)  # a pass may depend on the one before
            return not torch.equal(one, model(images))
        except Exception:  # batch norm of too few values, or somebody else's code
            return False
        finally:
            model.eval().load_state_dict(before, strict=False)


def _head_candidates(model: nn.Module, called: list[str], classes: int) -> list[str]:
    """Lists what may be the head, the likeliest first: linear layers, then linear parts."""
    last = list(dict.fromkeys(reversed(called)))
    linear = [name for name in last if _is_head(model, name, classes)]
    # Parts are tried in the order in which their calls end: an inner one before what holds it.
    return linear + [name for name in reversed(last) if name and _is_affine(model, name, classes)]


def _is_affine(model: nn.Module, name: str, classes: int) -> bool:
    """Whether a part of several layers maps features to logits as one linear layer would."""
    part = model.get_submodule(name)
    first = next((each for each in part.modules() if isinstance(each, nn.Linear)), None)
    if first is None or first is part or next(part.buffers(), None) is not None:
        return False
    drawn = torch.randn(2, first.in_features, generator=torch.Generator().manual_seed(0))
    one, other = drawn.to(first.weight).chunk(2)
    with torch.no_grad():
        try:
            # An affine f satisfies f(a + b) + f(0) = f(a) + f(b).
            both = part(one + other) + part(torch.zeros_like(one))
            return both.shape == (1, classes) and _alike(both, part(one) + part(other))
        except Exception:  # it takes something else
            return False


def _is_head(model: nn.Module, name: str, classes: int) -> bool:
    try:
        part = model.get_submodule(name)
    except AttributeError:
        return False
    if not name or not isinstance(part, nn.Linear) or part.out_features != classes:
        return False
    # The update has no gradient of a weight that a parametrization makes, as weight norm does.
    return "weight" in dict(part.named_parameters(recurse=False))


def _map_names(model: nn.Module, head: str | None) -> dict[str, str]:
    """Maps the names of a model's tensors to those in a Classifier whose head is layer `head`."""
    found = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        of_head = head is not None and name.startswith(f"{head}.")
        inner = name.removeprefix(f"{head}.") if of_head else name
        found[name] = f"head.{inner}" if of_head else f"body.module.{inner}"
    return found
