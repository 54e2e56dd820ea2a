"""Gradient matching: put candidates through the function that clients ran, and compare updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import denormalize
from fedsim.models.local import gradient, local_update, loss_function
from fedsim.models.victim import rebuild
from fedsim.rng import global_stream
from fedsim.types import Effect, LocalTraining, Observation, Tensors
from fedsim_attacks.fast_autograd._second_order import accelerate, drop_dead_weights, smooth
from fedsim_attacks.fast_autograd._tape import Function, tape_if_it_pays
from fedsim_attacks.gradient_matching._changed_batches import ChangedBatch
from fedsim_attacks.gradient_matching._image_priors import valid_range
from fedsim_attacks.labels.label_inference import infer_labels


@dataclass(frozen=True)
class Candidate:
    """A candidate batch: normalized images, with fixed labels or with logits of soft ones."""

    images: Tensor  # (N, C, H, W)
    labels: Tensor | None  # (N,) int64; None where soft labels are optimized
    logits: Tensor | None = None  # (N, K) of soft labels; None where labels are fixed
    drawn: tuple[Tensor, ...] = ()
    """What the model draws as it computes, in order; empty where that stays random."""

    @property
    def variables(self) -> list[Tensor]:
        """The tensors to optimize: images, logits of soft labels if there are any, then `drawn`."""
        labels = [] if self.logits is None else [self.logits]
        return [self.images, *labels, *self.drawn]

    def targets(self) -> Tensor:
        """Returns labels (N,) int64 or probabilities (N, K), differentiable in the logits."""
        if self.logits is not None:
            return self.logits.softmax(1)
        assert self.labels is not None
        return self.labels

    def hard_labels(self) -> Tensor:
        """Returns the labels, the likeliest of soft ones: (N,) int64."""
        return self.targets() if self.logits is None else self.logits.argmax(1)


_ROUNDING = 1e-11  # share of the update's energy below which a tensor is rounding


@dataclass(frozen=True)
class MatchedUpdate:
    """The observed update, in the parts that candidates can reach."""

    tensors: list[Tensor]  # compared tensors, in the order of the parameters
    square: Tensor
    """|t|² (0-d) of the tensors that are compared, also of their entries that are left out."""
    outside: Tensor
    """|t|² of the entries that are zero in every recomputed update and left out (0-d)."""


DistanceValue = tuple[Tensor, list[Tensor], Tensor]
"""(distance (0-d), direction, scale (0-d)): the derivative of the distance in the update is scale *
direction, in closed form, as autograd would keep a graph of it."""
Distance = Callable[[Sequence[Tensor], MatchedUpdate], DistanceValue]
"""Function from a recomputed update u and the target t to their `DistanceValue`."""


def cosine_distance(update: Sequence[Tensor], target: MatchedUpdate) -> DistanceValue:
    """Computes 1 - <u, t> / (|u| |t|) over all tensors as a `DistanceValue` (Geiping et al., 4)."""
    product, square = _inner_product(update, target.tensors), _inner_product(update, update)
    # An update of 0 has no direction: its distance is 1, and not undefined.
    square = square.clamp_min(torch.finfo(square.dtype).tiny)
    norms = square.sqrt() * target.square.sqrt()
    similarity = product / norms
    # ∂(1 - cos)/∂u = -(t - u <u, t> / |u|²) / (|u| |t|).
    pull = -product / square
    direction = [torch.addcmul(t, u, pull) for u, t in zip(update, target.tensors, strict=True)]
    return 1 - similarity, direction, -1 / norms


def squared_distance(update: Sequence[Tensor], target: MatchedUpdate) -> DistanceValue:
    """Computes |u - t|² / |t|² over all tensors as a `DistanceValue` (Zhu et al., 4, relative)."""
    direction = [u - t for u, t in zip(update, target.tensors, strict=True)]
    distance = (_inner_product(direction, direction) + target.outside) / target.square
    return distance, direction, 2 / target.square


def gaussian_distance(update: Sequence[Tensor], target: MatchedUpdate) -> DistanceValue:
    """Averages 1 - exp(-|u_l - t_l|² / |t_l|²) over tensors l = 1, 2, ..., weighted by 1 / l."""
    # Wang et al., SAPAG, 2020, take an entry's variance: that kernel is flat where attacks start.
    total = sum(1 / (place + 1) for place in range(len(update)))
    losses, direction = [], []
    for place, (u, t) in enumerate(zip(update, target.tensors, strict=True)):
        weight, away = 1 / (place + 1) / total, u - t
        width = t.square().sum().clamp_min(torch.finfo(t.dtype).tiny)
        kernel = (-away.square().sum() / width).exp()
        losses.append(weight * (1 - kernel))
        direction.append(away * (2 * weight * kernel / width))
    return torch.stack(losses).sum(), direction, losses[0].new_ones(())


def negative_log_likelihood(variance: float, pixels: int, scaled: bool) -> Distance:
    """Makes a distance |c u - t|² / (2 `variance` `pixels`): c is 1, or likeliest if `scaled`.

    It is -log p(t | u) per pixel of all images, of noise of that variance in each entry of t.
    """

    def distance(update: Sequence[Tensor], target: MatchedUpdate) -> DistanceValue:
        # Balunović et al., ICLR 2022, up to a constant.
        factor = target.square.new_ones(())
        if scaled:
            square = _inner_product(update, update).clamp_min(torch.finfo(factor.dtype).tiny)
            factor = (_inner_product(update, target.tensors) / square).clamp_min(0)
        direction = [factor * u - t for u, t in zip(update, target.tensors, strict=True)]
        away = _inner_product(direction, direction) + target.outside
        # The likeliest factor has slope zero: the derivative in u takes it for a constant.
        return away / (2 * variance * pixels), direction, factor / (variance * pixels)

    return distance


def reweighted_cosine(weights: Sequence[float], *, summed: bool = False) -> Distance:
    """Makes the distance that averages 1 - cos(u_i, t_i) by `weights`, or sums it if `summed`."""

    def distance(update: Sequence[Tensor], target: MatchedUpdate) -> DistanceValue:
        losses, direction = [], []
        # Only rounding is left of some gradients, as of a bias before batch norm.
        told = [t.square().sum() > _ROUNDING * target.square for t in target.tensors]
        counted = torch.stack([weight * each for weight, each in zip(weights, told, strict=True)])
        sizes = [t.numel() * each for t, each in zip(target.tensors, told, strict=True)]
        # Where all weights are 0, numbers of entries take their place.
        counted = torch.where(counted.sum() > 0, counted, torch.stack(sizes))
        total = counted.new_ones(()) if summed else counted.sum()
        for weight, u, t in zip(counted, update, target.tensors, strict=True):
            square, lengths = _lengths(u, t)
            cosine = (u * t).sum() / lengths
            # ∂(1 - cos)/∂u = u cos / |u|² - t / (|u| |t|).
            along = cosine / square
            losses.append(weight / total * (1 - cosine))
            direction.append(weight / total * (u * along - t / lengths))
        return torch.stack(losses).sum(), direction, losses[0].new_ones(())

    return distance


def _lengths(u: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Computes |u|² and |u| |t|, neither of them less than their product can be in that type."""
    tiny = torch.finfo(u.dtype).tiny
    square, wanted = (each.square().sum().clamp_min(tiny) for each in (u, t))
    both = square * wanted
    # Of a network that is sure of its images the product underflows, and its factors do not.
    lengths = torch.where(
        both > tiny / torch.finfo(u.dtype).eps, both.sqrt(), square.sqrt() * wanted.sqrt()
    )
    return square, lengths


def _inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    products = [torch.dot(_flat(x), _flat(y)) for x, y in zip(a, b, strict=True)]
    return torch.stack(products).sum()


def _flat(tensor: Tensor) -> Tensor:
    # In the order in which channels-last weights lie in memory: a view, not a copy.
    return (tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor).flatten()


_DRAWS = {torch.randn, torch.randn_like}
"""Functions whose results are fitted; whatever else a model draws stays random."""


@final
class GivenDraws(TorchFunctionMode):
    """Lets a model take `given` tensors for the normal values that it draws, in their order."""

    def __init__(self, given: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._left = list(given)
        self.taken: list[Tensor] = []
        """All tensors that were drawn, given or random, in order."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `function`, or answers in its place if it draws."""
        if function not in _DRAWS:
            return function(*args, **(kwargs or {}))
        # In order, so that a draw is the same variable in each recomputation.
        drawn: Tensor = self._left.pop(0) if self._left else function(*args, **(kwargs or {}))
        self.taken.append(drawn)
        return drawn


def _orthogonal_distance(
    update: Sequence[Tensor], target: Sequence[Tensor], norms: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Averages ln²(|u| / |t|) + d cos²(u, t) over tensors of d entries; returns its slopes, too."""
    losses, slopes = [], []
    for u, t, norm in zip(update, target, norms, strict=True):
        if u.numel() < 2 or not norm:
            # A slope of zero, so that slopes stay in the places of their tensors.
            slopes.append(torch.zeros_like(u))
            continue
        # d cos² is 1 on average for a random u.
        size = u.norm().clamp_min(torch.finfo(u.dtype).tiny)
        longer, cosine = (size / norm).log(), (u * t).sum() / (size * norm)
        losses.append(longer.square() + u.numel() * cosine.square())
        # ∂ ln|u| / ∂u = u / |u|²; ∂cos/∂u = t / (|u| |t|) - u cos / |u|².
        along = u / size.square()
        slope = 2 * longer * along
        slopes.append(slope + 2 * u.numel() * cosine * (t / (size * norm) - cosine * along))
    count = max(len(losses), 1)
    total = torch.stack(losses).sum() if losses else update[0].new_zeros(())
    return total / count, [slope / count for slope in slopes]


ComparedTensors = Literal["all", "body"]
"""Tensors that are compared: `all`, or those of the `body`, which are all but the head's."""


def excess(update: Tensor, bound: Tensor | float) -> Tensor:
    """Returns by how much each entry of `update` exceeds `bound` in magnitude, with its sign."""
    return update.sign() * (update.abs() - bound).clamp_min(0)


def removal_bounds(observation: Observation, update: Tensors) -> list[float] | None:
    """Bounds the removed entries of each tensor of `update`; None if none was removed."""
    effect = observation.effect
    if effect.removed is None:
        return None
    # Entries that were not chosen by magnitude, or with noise, may have been anything.
    if effect.removed == "others" or effect.noisy or observation.num_clients > 1:
        return [math.inf] * len(update)
    least = [float(t[t != 0].abs().min()) if t.any() else math.inf for t in update.values()]
    return least if effect.removed == "smallest_of_tensor" else [min(least)] * len(least)


Effects = Literal["ignored", "simulated"]
"""Treatments of what a defense changed. `ignored` takes the update for one of the images alone;
`simulated` does as the defense does, and undoes drawn views and mixtures at the end."""


@final
class Matching:
    """The observed update, and its recomputation from candidates on the observation's device."""

    def __init__(
        self,
        observation: Observation,
        dtype: torch.dtype = torch.float32,
        calls: int = 1,
        width: float = 0.0,
        tensors: ComparedTensors = "all",
        effects: Effects = "ignored",
    ) -> None:
        """Prepares the comparison; AttackFailed if nothing was updated of the `tensors`.

        Args:
            observation: The update, and how the clients trained.
            dtype: Precision of all computations.
            calls: Number of calls of `differentiate` to come; many pay for a recording.
            width: Width of the smoothed jumps of slopes (`smooth`); 0 leaves them.
            tensors: Tensors that are compared.
            effects: Treatment of what a defense changed.
        """
        self._observation = observation
        self._simulated = observation.effect if effects == "simulated" else Effect()
        self.changed = ChangedBatch.read(self._simulated.batch)
        """Changes of a step's batch, as far as they are allowed for."""
        self._calls = calls
        self._bound: tuple[Distance, Tensor | None, Function] | None = None
        self._dtype = dtype
        model = rebuild(observation).to(dtype)
        accelerate(model)
        if width:
            smooth(model, width)
        rule = observation.training.rule
        # Decay and a proximal term move weights that meet only padding, too: none may be dropped.
        moved = rule is not None and (rule.weight_decay or rule.proximal)
        self._windows = {} if moved else drop_dead_weights(model, observation.model.input_shape)
        # The mask of a client's dropout is unknown: its mean is simulated.
        self._training = replace(observation.training, dropout=0.0)
        frozen = {n: self._live(n, t) for n, t in observation.buffers.items() if n in self._windows}
        buffers = _cast(observation.buffers, dtype) | frozen
        self._loss = loss_function(model, buffers, self._training)
        self._parameters = {n: self._live(n, t) for n, t in observation.parameters.items()}
        self.names = [n for n in self._parameters if tensors == "all" or not n.startswith("head.")]
        """Names of the tensors that are compared, in the order of the target."""
        self._target = self._make_target()
        # Of all entries, padding included: a defense kept the length of the whole tensor.
        seen = replace(observation, effect=self._simulated)
        self._bounds = removal_bounds(seen, {n: observation.update[n] for n in self.names})
        self._norms = [observation.update[n].to(dtype).norm() for n in self.names]
        if tensors == "body" and not self._target.square:
            raise AttackFailed(
                "nothing of the observed update is outside of the head: match tensors: all"
            )
        self._groups = observation.num_clients
        cut = self._simulated.truncated is not None  # client by client
        pooled = self._training.algorithm == "fedsgd" and not _couples_batch(model, self._training)
        if pooled and not cut:
            self._groups = 1  # the mean of the clients' gradients is that of the pooled batch's
        self.box = valid_range(observation.model, self._target.square)
        """Normalized images of the pixels 0 and 1, (C, 1, 1) each."""
        size = torch.maximum(-self.box[0], self.box[1])
        self.range = (-size, size) if self.changed.signed else self.box
        """Bounds on the entries of a step's inputs, (C, 1, 1) each."""

    @property
    def counts(self) -> list[float]:
        """Number of non-zero parameters in each compared tensor, for `reweighted_cosine`."""
        return [float((self._observation.parameters[n] != 0).sum()) for n in self.names]

    @property
    def device(self) -> torch.device:
        return self._observation.device

    def _lay(self, tensor: Tensor) -> Tensor:
        """Copies a tensor, detached, to the precision and the memory order that are used here."""
        return tensor.detach().to(self._dtype).clone(memory_format=layout(tensor))

    def _live(self, name: str, tensor: Tensor) -> Tensor:
        """Selects the entries of a parameter, or of its update, that meet anything but padding."""
        window = self._windows.get(name)
        return self._lay(tensor if window is None else tensor[window])

    def _make_target(self) -> MatchedUpdate:
        update = [(n, self._observation.update[n].to(self._dtype)) for n in self.names]
        zero = torch.zeros((), dtype=self._dtype, device=self.device)
        outside = []
        for name, window in self._windows.items():
            if name not in self.names:
                continue
            dead = self._observation.update[name].to(self._dtype, copy=True)
            dead[window] = 0
            outside.append(dead.square().sum())
        return MatchedUpdate(
            tensors=[self._live(name, tensor) for name, tensor in update],
            square=_inner_product(*[[tensor for _, tensor in update]] * 2) if update else zero,
            outside=torch.stack([zero, *outside]).sum(),
        )

    def random_candidate(
        self, labels: Tensor | None, rng: torch.Generator, std: float = 1.0
    ) -> Candidate:
        """Draws normalized images from N(0, `std`²); logits from N(0, 1) if `labels` is None."""
        count, model = self._observation.num_images, self._observation.model

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(count, *shape, generator=rng)
            return drawn.to(self.device, self._dtype)

        images = (std * draw(*model.input_shape)).requires_grad_()
        logits = draw(model.num_classes).requires_grad_() if labels is None else None
        candidate = Candidate(images, labels, logits)
        if not self._simulated.drawn:
            return candidate
        # A pass whose update is thrown away tells how many draws there are, and their shapes.
        with GivenDraws() as chance, global_stream(int(torch.randint(2**31, (), generator=rng))):
            self.update(candidate.images, candidate.targets().detach(), create_graph=False)
        drawn = tuple(each.detach().clone().requires_grad_() for each in chance.taken)
        return replace(candidate, drawn=drawn)

    def update(self, images: Tensor, labels: Tensor, *, create_graph: bool = True) -> list[Tensor]:
        """Computes the compared tensors of the update that clients with `images` would send.

        Normalized images are in the order of clients, then of their steps; labels are numbers (N,)
        or probabilities (N, K). With `create_graph` it is differentiable in images, probabilities.
        """
        direction = self._direction if create_graph else self._detach
        updates = [
            self._bound_update(
                local_update(direction, self._parameters, self._batches(x, y), self._training)
            )
            for x, y in _chunks(images, labels, self._groups)
        ]
        if len(updates) == 1:
            return [updates[0][name] for name in self.names]
        # What the server sees is the mean of the clients' updates.
        return [torch.stack([u[n] for u in updates]).mean(0) for n in self.names]

    def differentiate(
        self, candidate: Candidate, distance: Distance
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the `distance` of a candidate's update from the observed one, and its gradients.

        Returns the distance (0-d), and its gradient in each of the candidate's `variables`. Where
        orthogonal updates are simulated, norms and inner products take the place of `distance`.
        """
        labels = candidate.labels
        # A recording holds for one distance and one tensor of labels.
        if self._bound is None or self._bound[0] is not distance or self._bound[1] is not labels:
            function = partial(self._differentiate, distance, labels)
            self._bound = distance, labels, tape_if_it_pays(function, self._calls, self.device)
        loss, *slopes = self._bound[2](*(each.detach() for each in candidate.variables))
        return loss, tuple(slopes)

    def _differentiate(
        self, distance: Distance, labels: Tensor | None, images: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            variables = [self._lay(images), *(each.detach().clone() for each in others)]
            for variable in variables:
                variable.requires_grad_()
            soft = variables[1] if labels is None else None
            candidate = Candidate(variables[0], labels, soft)
            drawn = variables[1 if labels is not None else 2 :]
            # Without a mode where nothing is fitted: it would slow every operation.
            with GivenDraws(drawn) if drawn else nullcontext():
                update = self.update(candidate.images, candidate.targets())
            update = self._censor(update)
        with torch.no_grad():
            found = [u.detach() for u in update]
            if self._simulated.orthogonal:
                loss, direction = _orthogonal_distance(found, self._target.tensors, self._norms)
                scale = torch.ones_like(loss)
            else:
                loss, direction, scale = distance(found, self._target)
        # Vector-Jacobian product with the distance's own derivative: no graph of the distance.
        slopes = torch.autograd.grad(update, variables, direction)
        return loss, *(slope.mul_(scale).contiguous() for slope in slopes)

    def _censor(self, update: list[Tensor]) -> list[Tensor]:
        """Leaves of each entry that was removed only what exceeds the largest that would be."""
        if self._bounds is None:
            return update
        # Directions are compared: bounds are in units of the entries that are left.
        kept = [u * (t != 0) for u, t in zip(update, self._target.tensors, strict=True)]
        square = _inner_product(kept, kept) / self._target.square
        scale = square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()
        return [
            k if math.isinf(bound) else torch.where(t == 0, excess(u, scale * bound), u)
            for u, k, t, bound in zip(update, kept, self._target.tensors, self._bounds, strict=True)
        ]

    def _bound_update(self, update: Tensors) -> Tensors:
        """Clips and cuts a client's recomputed update as its defenses did, in their order."""
        effect = self._simulated
        cut, norm = effect.truncated, effect.bound if effect.scaled else None
        if cut is None:
            return update
        if not effect.scaled_last:
            update = _clip_norm(update, norm)
        update = {name: tensor.clamp(-cut, cut) for name, tensor in update.items()}
        return _clip_norm(update, norm) if effect.scaled_last else update

    def pixels(self, images: Tensor) -> Tensor:
        """Converts normalized images to (N, C, H, W) float32 pixels in [0, 1]."""
        pixels = denormalize(images.detach(), self._observation.model).clamp(0, 1)
        return pixels.float().contiguous()

    def undo_changes(
        self, inputs: Tensor, labels: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Returns images and labels whose batches a defense changed into `inputs` of all steps.

        Both `inputs` (N, C, H, W) and images are normalized; `labels` are (N,) or (N, K).
        """
        if not self.changed.drawn:
            return inputs, labels
        size, spec = self._training.batch_size, self._observation.model
        parts = [
            self.changed.undo(x, y, spec, self.box, rng)
            for x, y in zip(torch.split(inputs, size), torch.split(labels, size), strict=True)
        ]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def _direction(self, parameters: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        images, labels = self.changed.simulate(images, labels, self._observation.model)
        return gradient(self._loss, parameters, images, labels, create_graph=True)

    def _detach(self, parameters: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        # The accelerated layers know a first differentiation by the graph that it makes.
        update = self._direction(parameters, images, labels)
        return {name: each.detach() for name, each in update.items()}

    def _batches(self, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Splits the images of one group into one batch per step."""
        steps = self._training.steps
        if self._training.batches == "same":
            return [(images, labels)] * steps
        return _chunks(images, labels, steps)


def granted_labels(observation: Observation, knowledge: Knowledge) -> Tensor | None:
    """Returns labels (N,) int64, true or inferred as `knowledge` grants; None without a grant."""
    if knowledge.grant.labels == "known":
        assert knowledge.true_labels is not None
        return knowledge.true_labels
    return infer_labels(observation) if knowledge.grant.labels == "inferred" else None


def _clip_norm(update: Tensors, norm: float | None) -> Tensors:
    """Scales an update to the L2 `norm` if it is longer; None leaves it as it is."""
    if norm is None or not update:
        return update
    length = torch.stack([torch.linalg.vector_norm(each) for each in update.values()]).norm()
    factor = norm / length.clamp_min(norm)
    return {name: tensor * factor for name, tensor in update.items()}


def _chunks(images: Tensor, labels: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    if count == 1:  # as they are: the layers know a leaf when they see one
        return [(images, labels)]
    return list(zip(images.chunk(count), labels.chunk(count), strict=True))


def layout(tensor: Tensor) -> torch.memory_format:
    """Chooses the memory format that is fastest on the tensor's device."""
    # CPU kernels take channels-last images and weights as they are, and reorder all others.
    last = tensor.ndim == 4 and tensor.device.type == "cpu"
    return torch.channels_last if last else torch.contiguous_format


def _couples_batch(model: nn.Module, training: LocalTraining) -> bool:
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return any(
        isinstance(module, norms) and (training.mode == "train" or not module.track_running_stats)
        for module in model.modules()
    )


def _cast(tensors: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies buffers to `dtype`, since a model in train mode writes its statistics into them."""
    return {n: (t.to(dtype) if t.is_floating_point() else t).clone() for n, t in tensors.items()}
