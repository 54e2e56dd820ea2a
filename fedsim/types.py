"""What passes between the stages: frozen values whose shapes and units are stated here.

Nothing here imports the rest of fedsim, so that a plugin or a replay needs no more than this.
Images are `float32` of shape (B, C, H, W); *pixels* are in [0, 1], *normalized* images are `(pixels
- mean) / std` and are what a model consumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Quoted: torch takes seconds to import, and whoever only calculates or refuses needs none of it.
Tensors = Mapping[str, "Tensor"]
"""Named tensors: a model's parameters, or an update of the same names and shapes."""

LARGEST = 1e100
"""Largest magnitude of a number accepted from others: its square and sums of it stay finite."""

Algorithm = Literal["fedsgd", "fedavg"]
Mode = Literal["train", "eval"]
Batches = Literal["same", "different"]
Sampling = Literal["without_replacement", "epochs", "poisson", "balls_in_bins"]
Watcher = Literal["server", "client", "eavesdropper"]
"""Parties that watch. `server` sees what it decodes, `client` (a participant) the global models
that it receives, `eavesdropper` what crosses the wire."""
Vantage = Literal["server", "aggregate", "client", "eavesdropper"]
"""Views of the watchers, by name; `aggregate` is that of a server whose stack combines updates."""
Manipulation = Literal["honest", "planted", "modified"]
"""Manipulations of the model by the server, from least to most: none; weights of a two-layer head
to read features from (`head.planted`); a module in front to read images from (`imprint`)."""
Unit = Literal["client", "example"]
Relation = Literal["zero_out", "replace_one", "add_or_remove", "close", "relative"]
AuditMethod = Literal["two_worlds", "one_run"]
"""`two_worlds`: one canary takes part in half of many runs. `one_run`: each of many canaries takes
part in one run by the toss of a coin."""

Status = Literal["ok", "failed", "unscored", "unseen"]
"""States of an attack on a recording. `failed`: without a score. `unscored`: not made yet, as the
truth is elsewhere. `unseen`: not possible, as the vantage shows no update."""

MOST_STEPS = 100_000

ReleaseKind = Literal[
    "sketch",
    "coefficients",
    "sketched_coefficients",
    "normal_coefficients",
    "kernel_regression",
    "kernel_model",
]
Payload = Literal["update"] | ReleaseKind
"""Kinds of client message: a model's update, or what was computed from rows in closed form."""

DEVICE_PATTERN = r"^(auto|cpu|cuda(:[0-9]{1,3})?)$"


class FedsimError(Exception):
    """Raised for an error that a user can act on: the message names the cause and the remedy."""


class RunFailed(FedsimError):  # noqa: N818 - reads as what happened
    """Raised for a failure after work had begun: finished work is kept; `fedsim` exits with 1."""


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """Describes how local steps differ from SGD of the mean cross-entropy.

    Fields without a text are arguments of torch.optim's classes.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    nesterov: bool = False
    weight_decay: float = 0.0
    """Factor of the weights, added to the gradient; AdamW takes lr times that off the weights."""
    proximal: float = 0.0
    """μ of FedProx: μ times the weights' movement so far is added to each step's gradient."""
    rates: tuple[float, ...] | None = None
    """Learning rate of each step; None if all are `LocalTraining.lr`."""
    label_smoothing: float = 0.0
    """Share of each label that is spread evenly over all classes, as in torch's cross-entropy."""
    class_weights: tuple[float, ...] | None = None
    """Weight of each class in the loss, as in torch's cross-entropy; None if all are alike."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Describes how a client turns a batch into an update; public, as observations declare it.

    `fedsgd`: the update is the gradient of the mean loss over one batch (gradient units); `steps`
    is 1. `fedavg`: it is `weights after - weights before`, after `steps` SGD steps on `batch_size`
    examples each (weight units). `lr` and `momentum` are those of torch's SGD, whose momentum
    starts anew in each round. `mode` is that of the model: under `train`, batch norm takes its
    statistics from the batch.
    """

    algorithm: Algorithm
    steps: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    mode: Mode = "train"
    batches: Batches = "different"
    """`same`: each step uses the same batch; `different`: each step uses a batch of its own."""
    sampling: Sampling = "without_replacement"
    """`without_replacement`: each step draws a batch of one size. `epochs`: steps go through a
    client's examples in an order that each epoch draws anew, and leave a last smaller batch out.
    `poisson`: each example is in a step's batch with the same probability, independently.
    `balls_in_bins`: each draws one of `bins` once, and is in the batch of every `bins`-th step."""
    dropout: float = 0.0
    """Probability that a hidden neuron of the head is dropped in a step."""
    rule: StepRule | None = None
    """Rule of steps that are not SGD of the mean cross-entropy; None for such SGD."""

    @property
    def sums_gradients(self) -> bool:
        """Whether the update is a sum of its steps' gradients, times factors known beforehand."""
        rule = self.rule
        if rule is None:
            return True
        # Adam and AdamW divide each entry by its own size; decay and a proximal term add weights.
        return rule.optimizer == "sgd" and not (rule.nesterov or rule.weight_decay or rule.proximal)

    @property
    def sizes_vary(self) -> bool:
        """Whether batches vary in size: `batch_size` is their mean, and sums are divided by it."""
        return self.sampling in ("poisson", "balls_in_bins")

    @property
    def distinct_batches(self) -> int:
        """Number of batches that a client draws: one, if all steps use the same."""
        return self.steps if self.batches == "different" else 1

    @property
    def num_images(self) -> int:
        """Number of images in `distinct_batches`, a mean where sizes vary; repeats count again."""
        return self.batch_size * self.distinct_batches

    def as_probed(self, batch_size: int) -> LocalTraining:
        """Returns a copy as a probe is answered: each batch has exactly `batch_size` images."""
        return replace(self, batch_size=batch_size, sampling="without_replacement")

    def bins(self, num_examples: int) -> int:
        """Returns the bins of `balls_in_bins`: num_examples / batch_size, rounded, at least 1."""
        # Halves are rounded up; `round` would take them to the even neighbour.
        return max(1, math.floor(num_examples / self.batch_size + 0.5))


@dataclass(frozen=True, kw_only=True)
class Update:
    """Holds what a client releases in a round.

    `tensors`, named and shaped as the global parameters, are the gradient or change of weights that
    `LocalTraining` describes, or a closed-form release. `buffers` has the new floating-point
    buffers by name (empty for models without), and `num_examples` is the aggregation weight.
    """

    tensors: Tensors
    num_examples: int
    buffers: Tensors = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class InputColumn:
    """Describes a column of a table as a model gets it."""

    name: str
    categories: tuple[str, ...] = ()
    """Categories of the column, each with an entry, 1 if it is the row's and else 0. Empty for a
    quantity, which has one entry on [0, 1], the ends of its declared range."""

    @property
    def width(self) -> int:
        """Number of the column's entries in an input."""
        return max(1, len(self.categories))


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """Describes a model's input: float32 entries on [0, 1] (pixels or a row's), then normalized."""

    input_shape: tuple[int, ...]
    """(C, H, W) of an image, (D,) of a row of a table."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Normalization (x - mean) / std, one of each per channel (C) or entry of a row (D); public."""
    columns: tuple[InputColumn, ...] = ()
    """Columns of a row, in the order of its entries; empty for images."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(InputSpec):
    """Describes a model so that an attacker, who has its code, can build it again.

    `name` is the entry point of the model's plugin, `parameters` are the plugin's fields, and
    `num_classes` counts the outputs.
    """

    name: str
    parameters: Mapping[str, Any]
    num_classes: int
    payload: ClassVar[Payload] = "update"
    field: ClassVar[str] = "model"
    """Name of the field of a recording that holds the description."""

    @property
    def server(self) -> Manipulation:
        """Server's manipulation of the model, see `server_of`."""
        return server_of(self.parameters)

    def as_model(self, id: str) -> ModelSpec:
        """Returns this description itself; `id` is not used."""
        return self

    def as_release(self, id: str) -> ReleaseSpec:
        """Raises a FedsimError, always: observation `id` is a model's update, not a release."""
        raise FedsimError(
            f"{id} is an update of model {self.name}, and not what a closed-form learner released; "
            "use an attack on updates (`fedsim list attacks`)"
        )


def watcher_of(vantage: str) -> str:
    """Returns the watcher at a `vantage`: `server` at the `aggregate`, else the same name."""
    return "server" if vantage == "aggregate" else vantage


def server_of(parameters: Mapping[str, Any]) -> Manipulation:
    """Returns the server's manipulation of a model, by its `ModelSpec.parameters`.

    It is `modified` with an imprint, else `planted` with a planted head, else `honest`.
    """
    if parameters.get("imprint"):
        return "modified"
    head = parameters.get("head")
    return "planted" if isinstance(head, Mapping) and head.get("planted") else "honest"


@dataclass(frozen=True, kw_only=True)
class ReleaseSpec:
    """Describes, publicly, how learner `learner` of `parameters` computes a release from rows.

    It does not say how many rows there are: that would tell whether one of them is there.
    """

    learner: str
    parameters: Mapping[str, Any]
    kind: ReleaseKind
    """Kind of release, as `fedsim.contracts.guarantee.Release` describes them."""
    columns: int
    """r, the number of columns of the random matrix G; 0 if none is drawn."""
    sigma: float
    """σ of the rows σ I that each client appends to its own; 0 without a data defense."""
    row_norm: float
    """l, the bound on the L2 norm of a row; longer rows were scaled down to it."""
    names: tuple[str, ...]
    """Names of the d features and, last, of the target, each mapped from its declared range to [-1,
    1]. Of a kernel regression: of the d entries of a unit vector, then of the classes."""
    intercept: bool
    """Whether the last feature is the constant 1 (before a row is scaled down)."""
    classes: tuple[str, ...] | None
    """The two classes of the target, -1 and +1 (before a row is scaled down). Of a kernel
    regression all classes: a row ends with an entry for each, 1 for its class, else 0. None for a
    quantity."""
    statistics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Statistic that a defense privatized -> `StatisticDefense.public_parameters` of its law."""
    server: ClassVar[Manipulation] = "honest"
    field: ClassVar[str] = "release"
    counted: bool = False
    """Whether the release shows its number of rows. That number tells whether a row is there, so
    attacks are then asked whether it or another one in its place is there."""

    @property
    def payload(self) -> Payload:
        """Kind of release."""
        return self.kind

    def as_model(self, id: str) -> ModelSpec:
        """Raises a FedsimError, always: observation `id` is a release of rows, not an update."""
        raise FedsimError(
            f"{id} is what learner {self.learner} released, and of no model; use an attack that "
            "reads such releases (`fedsim list attacks`)"
        )

    def as_release(self, id: str) -> ReleaseSpec:
        """Returns this description itself; `id` is not used."""
        return self


@dataclass(frozen=True, kw_only=True)
class Named:
    """Names a plugin as a scenario does: its entry point's name and its parameters."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Describes noise of one variance around zero, added to every entry independently."""

    variance: float
    """Variance of an entry, > 0, in squared units of what it is `on`."""
    on: Literal["step", "update", "sum"]
    """`step`: the direction of each local step (a gradient). `update`: a client's update. `sum`:
    the sum of all clients' updates, to which the server adds it."""
    correlation: float = 0.0
    """λ in [0, 1) of the noise z_t - λ z_(t-1), where z_t has this variance and z_0 = 0. t counts a
    client's steps over all rounds or, on a `sum`, the rounds."""


@dataclass(frozen=True, kw_only=True)
class ImageChange:
    """Describes a change that is the same for every image (`fedsim.contracts.views.apply_view`)."""

    name: Literal["rotate", "shear", "translate_x", "translate_y", "flip_x", "flip_y", "contrast"]
    by: float = 0.0
    """Degrees of a rotation, counterclockwise. Columns by which a shear moves a row left, for each
    row below the center. Share of the width (`translate_x`) or height (`translate_y`) that a
    translation moves left or up, in whole pixels. Factor of the contrast around the mean
    brightness. Flips, of left and right (`flip_x`) or top and bottom, have none."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Describes a batch in which each image is replaced by views of it, with its label."""

    views: tuple[tuple[ImageChange, ...], ...]
    """Changes of each view, in order; a view of no changes is the image itself."""
    copies: bool
    """Whether all views take the image's place. Else one does, which is drawn for each image."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Describes a batch whose inputs, and labels, are weighted means of several of its images'.

    The weights, which are secret, and the images are drawn.
    """

    images: int
    """Number of images in a mean, of which some may be the same."""
    signs: bool = False
    """Whether each entry of a normalized input is multiplied by 1 or -1, drawn at random."""


Removal = Literal["smallest", "smallest_of_tensor", "others"]
"""Rules by which entries are zeroed. `smallest`: the smallest of all. `smallest_of_tensor`: the
same share of each tensor's smallest. `others`: another rule, under which a zero tells nothing."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Describes what a defense does to an update, as far as an attack can use it; it is public.

    What it does to local training (steps, dropout in the head) is in `LocalTraining`, and to the
    statistics of a closed-form release in `ReleaseSpec`.
    """

    known: bool = True
    """Whether the defense declares its effect; if not, nothing else here may be relied upon."""
    noise: tuple[Noise, ...] = ()
    """Noises that are added, in order of the defenses."""
    removed: Removal | None = None
    """Rule by which entries are set to zero; None if none are."""
    truncated: float | None = None
    """Largest magnitude of an entry before noise, to which others are cut; None if none are."""
    scaled: bool = False
    """Whether the update is multiplied by a factor in (0, 1] that only its client knows."""
    scaled_last: bool = False
    """Whether that factor acts after the cut of `truncated`, and not before it."""
    bound: float | None = None
    """L2 norm that the update does not exceed before noise; None without such a bound."""
    scaled_examples: bool = False
    """Whether each example's gradient is multiplied by a factor of its own in (0, 1]."""
    rounded: bool = False
    """Whether a tensor's entries are multiples of its smallest non-zero magnitude: a grid, or
    signs. Noise and removal that follow destroy that."""
    mixed: bool = False
    """Whether entries change in a way that no other field states: by those at other positions (a
    projection, a transform), or by a curve."""
    orthogonal: bool = False
    """Whether each tensor is a random one of the norm of the batch's gradient, orthogonal to it;
    zero if it has one entry. `mixed` has to be declared as well."""
    model: tuple[Named, ...] = ()
    """Defenses that alter the model, in order; whoever has them installed builds the same model
    (`fedsim.models.victim.rebuild`), however little else is known."""
    drawn: bool = False
    """Whether the altered model draws chance, so that a batch has another update each time."""
    batch: tuple[Augmentation | Mixture, ...] = ()
    """Changes of a local step's batch, in the order in which they act on images."""

    @property
    def noisy(self) -> bool:
        """Whether noise is added, the model draws chance (`drawn`), or the effect is not known."""
        return bool(self.noise) or self.drawn or not self.known

    @property
    def exact(self) -> bool:
        """Whether the update is the computed one, but for `scaled` and `scaled_examples`."""
        altered = self.removed or self.truncated is not None or self.rounded or self.mixed
        return not altered and not self.batch and not self.noisy

    def then(self, after: Effect) -> Effect:
        """Returns the effect of a defense with this effect, followed by one with effect `after`."""
        bounds = [bound for bound in (self.bound, after.bound) if bound is not None]
        cuts = [cut for cut in (self.truncated, after.truncated) if cut is not None]
        # Where two rules act, a zero no longer says which of them set it.
        removals = {removal for removal in (self.removed, after.removed) if removal}
        return Effect(
            known=self.known and after.known,
            noise=self.noise + after.noise,
            removed="others" if len(removals) > 1 else next(iter(removals), None),
            truncated=min(cuts, default=None),
            scaled=self.scaled or after.scaled,
            scaled_last=after.scaled_last
            or (after.truncated is None and self.scaled_last)
            or (after.truncated is None and self.truncated is not None and after.scaled),
            bound=min(bounds, default=None),
            scaled_examples=self.scaled_examples or after.scaled_examples,
            rounded=self.rounded or after.rounded,
            mixed=self.mixed or after.mixed,
            # Of anything else that acts before or after, norm and angle tell no gradient's.
            orthogonal=(self.orthogonal and after == Effect())
            or (after.orthogonal and replace(self, model=()) == Effect()),
            model=self.model + after.model,
            drawn=self.drawn or after.drawn,
            # A training defense hands its batch to those before it.
            batch=after.batch + self.batch,
        )


UNKNOWN = Effect(known=False)
"""Effect of a defense that does not declare it."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Holds what an attacker at a vantage point saw of one update, decoded from the wire.

    It holds no label, no pixel, no row and no client state: only what crossed the wire and what is
    public. `round` counts from 1, and `trial`, of the batches that a client was probed with, from
    0.
    """

    id: str
    """`<stack>/round-0001/client-0000-b4-t0`, also the path of its files below `observations/`;
    with `training` in place of a probe's batch size and trial for an update of training."""
    update: Tensors
    """Update as decoded from the wire, after the defense; named and shaped as `parameters`."""
    buffers_update: Tensors
    """New batch-norm buffers of the client; empty if the model has none."""
    parameters: Tensors
    """Global weights that the client started from."""
    buffers: Tensors
    """Buffers of the global model that the client started from."""
    spec: ModelSpec | ReleaseSpec
    """Description of the model that was trained, or of the release of a closed-form learner."""
    training: LocalTraining
    """Local training, as the stack's training defenses changed it. For rows, `batch_size` is the
    mean number that took part, each by the same chance."""
    defense: tuple[Mapping[str, Any], ...]
    """Announced defense stack: `name` and parameters in use of each, in order of application. `std`
    of Gaussian noise is among them even if another parameter declared it."""
    effect: Effect
    """Effect of that stack on the update, which attacks read instead of the defenses' names."""
    vantage: Vantage
    round: int
    client: int
    """Client (partition) id; -1 at the aggregate vantage. At the client vantage it is the watching
    client, and `update` is the mean of the others."""
    num_clients: int
    """Number of clients whose mean `update` is: 1 at the server's and eavesdropper's vantage."""
    trial: int
    seed: int
    """Seed of attacks: the scenario's `attack_seed`, from which no stream of clients follows."""
    releases: int = 1
    """Number of releases of the same images at the same weights whose mean `update` is."""
    participants: tuple[int, ...] = ()
    """Clients whose mean `update` is, ascending, as the server knows them at the aggregate vantage.
    Empty elsewhere, and where recordings do not say."""

    @property
    def server(self) -> Manipulation:
        """Manipulation of the model by the server; `honest` for a release of rows."""
        return self.spec.server

    @property
    def model(self) -> ModelSpec:
        """Description of the model that was trained; a FedsimError if none was."""
        return self.spec.as_model(self.id)

    @property
    def release(self) -> ReleaseSpec:
        """Description of how the release comes from rows; a FedsimError for a model's update."""
        return self.spec.as_release(self.id)

    @property
    def payload(self) -> Payload:
        """Kind of message that was observed, which an attack has to be able to read."""
        return self.spec.payload

    @property
    def device(self) -> torch.device:
        """Device that the tensors are on."""
        return next(iter(self.parameters.values())).device

    @property
    def num_images(self) -> int:
        """Number of images behind the update, counted as in `LocalTraining.num_images`."""
        return self.training.num_images * self.num_clients


CANDIDATE_INPUTS = "candidate_inputs"
"""Tensor of a client's truth: (N, ...) inputs on [0, 1] that membership attacks are asked about."""
CANDIDATE_LABELS = "candidate_labels"
"""Tensor of a client's truth: (N,) int64 classes of these candidates."""
CANDIDATE_MEMBERS = "candidate_members"
"""Tensor of a client's truth: (N,) bool, whether the client trains on each candidate."""

SOURCE_INPUTS = "source_inputs"
"""Tensor of a joined truth: (N, ...) inputs on [0, 1] whose client source attacks are asked for."""
SOURCE_LABELS = "source_labels"
"""Tensor of a joined truth: (N,) int64 classes of these inputs."""
SOURCE_CLASSES = "source_classes"
"""Tensor of a joined truth: (K, C) int64, candidates of each class that each client holds out,
which tell clients' proportions of classes apart from the records themselves."""
SOURCE_CLIENTS = "source_clients"
"""Tensor of a joined truth: (K,) int64, ascending numbers of the clients that the watcher saw."""
SOURCE_PARTICIPANTS = "source_participants"
"""Tensor of a joined truth: (R, K) bool, whether each client was part of each recording."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Holds what clients really used. It goes to the score, never to an attack."""

    asked_singly: ClassVar[bool] = False
    """Whether attacks are asked about one row of it at a time."""
    more: Tensors = field(default_factory=dict)
    """Part of a target -> further truth that it had clients leave (`Target.leave`)."""
    local_losses: Tensor | None = None
    """(2,) mean cross-entropy on the batch before and after local training, without update
    defenses; the mean over clients. None for a single gradient, and where nothing is trained."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors that are recorded, by field or by name in `more`, without None."""
        import torch

        # Files hold tensors alone, so that `classes` of rows travels as one.
        own = {
            n: torch.as_tensor(v)
            for n, v in vars(self).items()
            if isinstance(v, torch.Tensor | int)
        }
        return {**own, **self.more}

    @staticmethod
    def of(tensors: Tensors) -> Truth:
        """Builds a RowTruth from what `tensors` returned if it has `members`, or a GroundTruth.

        A lacking tensor without a default is a TypeError.
        """
        # Files do not say what they hold: only a truth of rows has to say who took part.
        kind = RowTruth if "members" in tensors else GroundTruth
        known = {each.name for each in fields(kind)} - {"more"}
        more = {name: value for name, value in tensors.items() if name not in known}
        own: dict[str, Any] = {name: tensors[name] for name in tensors if name in known}
        if "classes" in own:
            own["classes"] = int(own["classes"])
        return kind(**own, more=more)

    def victims(self) -> Tensor:
        """Returns the attacked examples along the first axis; here always a NotImplementedError."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GroundTruth(Truth):
    """Holds the batch that an update was computed from."""

    images: Tensor
    """(N, C, H, W) pixels in [0, 1]; for rows of a table (N, D) entries on [0, 1]. `columns` (D,)
    among `more` then has the number of each entry's column."""
    labels: Tensor
    """(N,) int64."""
    features: Tensor | None = None
    """(N, d) inputs of the head under the global weights; None if they were not kept."""

    def victims(self) -> Tensor:
        """Returns the images of the batch, (N, C, H, W) in [0, 1], or a table's rows (N, D)."""
        return self.images


@dataclass(frozen=True, kw_only=True)
class RowTruth(Truth):
    """Holds the rows that a release may come from, and whether each one took part.

    Each took part with the same chance, independently of all others, so that knowing the others
    tells an attacker nothing of it.
    """

    asked_singly: ClassVar[bool] = True
    rows: Tensor
    """(N, d + 1) float64: features and target, or in its place an entry for each of `classes`."""
    members: Tensor
    """(N,) bool: whether the row took part."""
    clients: Tensor
    """(N,) int64: the client of each row, counted from 0 among the clients of the release."""
    scored: Tensor
    """(d + 1,) bool: the entries that are data, and neither the constant feature nor classes."""
    classes: int = 0
    """Number of classes, each with an entry at the end of a row; 0 if the last entries are data."""

    def victims(self) -> Tensor:
        """Returns the n rows that took part, (n, d + 1)."""
        return self.rows[self.members]


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Holds what an attack claims to have recovered; None for what it does not recover."""

    images: Tensor | None = None
    """(N, C, H, W) pixels in [0, 1]."""
    labels: Tensor | None = None
    """(N,) int64."""
    features: Tensor | None = None
    """(N, d) inputs of the head."""
    features_by: str | None = None
    """Name of another attack that these features are from, and unchanged since; else None."""
    stages: int | None = None
    """Number of stages that the body was cut into; from four on, each is inverted on its own. None
    where the attack does not cut the body."""
    rows: Tensor | None = None
    """(N, d + 1) in [-1, 1], entries as in `RowTruth.rows`. An attack answers with N = 1."""
    membership: Tensor | None = None
    """(N,) score of each row or candidate: the higher, the likelier it took part. The scale is the
    attack's own, and a log-likelihood ratio only where the attack says so."""
    more: Tensors = field(default_factory=dict)
    """Part -> answer, for targets of other packages."""
    determined: Tensor | None = None
    """(N,) bool: whether the observation leaves no other features near an image's, within its
    rounding and noise. None where the attack does not say."""
    certified: Tensor | None = None
    """(N,) bool: whether the attack knows that an image's features and labels, as far as it returns
    them, are right: they reproduce the observation to rounding, are determined, and no other answer
    was found that does. None where the attack offers no certificate."""
    loss: float
    """Value of the attack's own objective at the answer; of several restarts, the least wins."""
    iterations: int
    """Number of iterations of the attack's optimizer; 0 without one."""

    def parts(self) -> dict[str, Tensor]:
        """Returns part -> answer, if any: images, labels, features, rows, membership, `more`."""
        own = {name: getattr(self, name) for name in _PARTS}
        return {name: part for name, part in {**own, **self.more}.items() if part is not None}

    def with_parts(self, parts: Tensors) -> Reconstruction:
        """Returns a copy with `parts` (part -> answer) added, or replacing answers of that name."""
        own: dict[str, Any] = {name: part for name, part in parts.items() if name in _PARTS}
        more = {name: part for name, part in parts.items() if name not in _PARTS}
        return replace(self, **own, more={**self.more, **more})


_PARTS = ("images", "labels", "features", "rows", "membership")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Holds labelled inputs of a model in memory, on the CPU: images, or rows of a table.

    Label k stands for `classes[k]`. The test split has the shapes and types of the training split.
    """

    name: str
    train_images: Tensor
    """(N, C, H, W) uint8; (N, D) float32 on [0, 1] of a table."""
    train_labels: Tensor
    """(N,) int64."""
    test_images: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Normalization, see `InputSpec`; `columns` is described there, too."""
    classes: tuple[str, ...]
    columns: tuple[InputColumn, ...] = ()
    client_of: Tensor | None = None
    """(N,) int64: the natural client of each training image, where the source knows it."""
    private_statistics: tuple[str, ...] | None = None
    """Names of fields that were computed from training images without noise ("mean and std"), which
    voids every claim of privacy; empty if none was. None if the source does not say: no claim
    either."""
    placed_by_label: bool = False
    """Whether changing one image's label would move other images to other places and so, where a
    partition deals by places, to other clients."""
    left_out: tuple[tuple[str, int], ...] = ()
    """(reason, count) of the files, or a table's columns, that the source found and did not use."""

    @property
    def input_spec(self) -> InputSpec:
        """Description of what a model of these data computes from."""
        return InputSpec(
            input_shape=tuple(self.train_images.shape[1:]),
            mean=self.mean,
            std=self.std,
            columns=self.columns,
        )

    @property
    def noun(self) -> str:
        """Word for an example: `row` or `image`."""
        return "row" if self.columns else "image"

    @property
    def source_noun(self) -> str:
        """Word for a thing that the source may leave out: `column` or `file`."""
        return "column" if self.columns else "file"

    @property
    def inputs(self) -> Tensor:
        """All training inputs as in memory: (N, C, H, W) uint8, or (N, D) float32 of a table."""
        return self.train_images

    def examples_at(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns inputs (n, ...) float32 on [0, 1], labels (n,) of training examples `indices`."""
        return as_pixels(self.train_images[indices]), self.train_labels[indices]

    @property
    def test_inputs(self) -> Tensor:
        """All test inputs, in shape and type as `inputs`."""
        return self.test_images

    @property
    def test_classes(self) -> Tensor:
        """(N,) int64: the class of each test input."""
        return self.test_labels

    def labelled(self) -> Dataset:
        """Returns these data themselves, on which a model is trained as they are."""
        return self

    def without_training(self) -> Dataset:
        """Returns a copy without clients' examples, with the test split: a server may hold it."""
        return replace(
            self,
            # An empty slice keeps shape and dtype, from which `input_spec` is read.
            train_images=self.train_images[:0],
            train_labels=self.train_labels.new_empty(0),
            client_of=None,
        )


def as_pixels(images: Tensor) -> Tensor:
    """Converts uint8 images to float32 pixels on [0, 1]; floating-point inputs stay as they are."""
    return images if images.is_floating_point() else images.float() / 255


_ROUNDING = 1e-12
"""Relative rounding error granted to a norm at its bound, which changes a claim as little."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Holds a tabular data source in memory: rows of bounded norm, ending with the target.

    The bound is public: it follows from declared ranges, since one that is read from the rows is no
    part of a proof of privacy. A longer training row raises a FedsimError; test rows may be longer.
    """

    noun: ClassVar[str] = "row"
    source_noun: ClassVar[str] = "column"
    name: str
    train_rows: Tensor
    """(N, d + 1) float64: d features and the target, of L2 norm at most `row_norm`."""
    train_labels: Tensor
    """(N,) int64: the class of each row, by which a partition divides; all 0 in a regression."""
    test_rows: Tensor
    columns: tuple[str, ...]
    """Names of the d features and of the target."""
    row_norm: float
    """l, the public bound on the L2 norm of a row."""
    classes: tuple[str, ...] | None
    """Classes of the target, evenly spaced from -1 to +1 (before rows are scaled down to the
    bound); None if the target is a quantity."""
    feature_columns: tuple[InputColumn, ...] = ()
    """Columns of the features without the constant one; empty if each feature is a quantity."""
    intercept: bool = False
    """Whether the last feature is the constant 1 (before rows are scaled down to the bound)."""
    client_of: Tensor | None = None
    """(N,) int64: the natural client of each training row, where the source knows it."""
    private_statistics: tuple[str, ...] | None = None
    """Names as in `Dataset.private_statistics`, of training rows ("ranges of the columns")."""
    left_out: tuple[tuple[str, int], ...] = ()
    """(reason, count) of the columns that the source found and did not use."""

    def __post_init__(self) -> None:
        """Refuses, by a FedsimError, a training row beyond the bound that every claim rests on."""
        norms = self.train_rows.norm(dim=1)
        # Negated, and not `norms > ...`: a norm of NaN compares as False, and is refused as well.
        beyond = ~(norms <= self.row_norm * (1 + _ROUNDING))
        if beyond.any():
            row = int(beyond.nonzero()[0])
            raise FedsimError(
                f"{self.name}: training row {row} has an L2 norm of {float(norms[row]):.6g}, and "
                f"row_norm declares at most {self.row_norm:.6g}; scale rows down to it "
                "(`fedsim.data.table.bound_rows`), or declare a larger bound"
            )

    @property
    def inputs(self) -> Tensor:
        """(N, d + 1) float64: all training rows, with their targets."""
        return self.train_rows

    def examples_at(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the training rows (n, d + 1) at `indices` (n,), and their labels (n,)."""
        return self.train_rows[indices], self.train_labels[indices]

    @property
    def test_inputs(self) -> Tensor:
        """(N, d + 1) float64: all test rows, with their targets."""
        return self.test_rows

    @property
    def test_classes(self) -> Tensor | None:
        """(N,) int64: the class of each test row; None if the target is a quantity."""
        if self.classes is None:
            return None
        # Inverts the even spacing of K classes, of which class k stands at 2k / (K - 1) - 1.
        return ((self.test_rows[:, -1] + 1) / 2 * (len(self.classes) - 1)).round().long()

    def labelled(self) -> Dataset:
        """Returns features on [0, 1] and classes; a FedsimError if the target is a quantity."""
        labels = self.test_classes
        if self.classes is None or labels is None:
            raise FedsimError(
                f"data.source: {self.name} has the target {self.columns[-1]!r}, a quantity, and a "
                "model tells classes apart; declare the target's classes (`target: {name: ..., "
                "classes: [...]}`), or use learner least_squares"
            )
        # Neither the target, which is last, nor the constant feature is an input of a model.
        width = len(self.columns) - 1 - self.intercept
        features = self.feature_columns or tuple(InputColumn(name=n) for n in self.columns[:width])
        # Rows that were scaled down to the bound lie nearer to the middle, and stay so here.
        train, test = (
            ((rows[:, :width] + 1) / 2).float().clamp(0, 1)
            for rows in (self.train_rows, self.test_rows)
        )
        return Dataset(
            name=self.name,
            train_images=train,
            train_labels=self.train_labels,
            test_images=test,
            test_labels=labels,
            mean=(0.5,) * width,
            std=(0.5,) * width,
            classes=self.classes,
            columns=features,
            client_of=self.client_of,
            private_statistics=self.private_statistics,
            left_out=self.left_out,
        )

    def without_training(self) -> Table:
        """Returns a copy without clients' rows, with the test split: a server may hold it."""
        return replace(
            self,
            train_rows=self.train_rows.new_empty((0, self.train_rows.shape[1])),
            train_labels=self.train_labels.new_empty(0),
            client_of=None,
        )


@dataclass(frozen=True, kw_only=True)
class PrivacyClaim:
    """States what a defense stack guarantees: `epsilon` at `delta`, by the method `accountant`.

    ε is ∞ unless the stack is a known mechanism. If nothing is proven, `delta`, `accountant`,
    `unit` and `relation` are None.
    """

    epsilon: float
    delta: float | None
    accountant: str | None
    unit: Unit | None
    """Owner of what is hidden: all of a client's data, or one example."""
    relation: Relation | None = None
    """Neighbours of the claim. The hidden contribution is exchanged for zero (`zero_out`), for any
    other (`replace_one`), or for one at most β away (`close`). Or the example is there or not
    (`add_or_remove`), maybe only among declared databases (`relative`). `close` and `relative` are
    no differential privacy."""
    reason: str | None
    """Reason for an ε of ∞; None if ε is finite."""
    covers: str = ""
    """Wording of the releases that the claim covers, and of its conditions."""
    claimed_epsilon: float | None = None
    """ε that the defenses' configurations state, whatever is proven; None if they state none."""
