"""Declares the scenario, which a user writes, as frozen pydantic models without unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from fedsim.contracts.grant import Grant
from fedsim.types import (
    DEVICE_PATTERN,
    MOST_STEPS,
    Algorithm,
    AuditMethod,
    Batches,
    Mode,
    Sampling,
    Watcher,
)

# Neither two dots in a row nor a dot at an end can occur, so that no name leads to another folder.
SLUG_PATTERN = r"^[A-Za-z0-9](\.?[A-Za-z0-9_+-])*$"
Slug = Annotated[str, Field(pattern=SLUG_PATTERN, max_length=64)]
"""A name that is also a safe file name."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Positive = Annotated[float, Field(gt=0, lt=1e12)]


class ScenarioSection(BaseModel):
    """Base of every section of a scenario; instances are frozen.

    A ValidationError refuses unknown keys, numbers that are not finite, and values of another type.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        # Text is never taken for a number, nor a number for text.
        strict=True,
    )


class PluginRef(ScenarioSection):
    """Names a plugin, with its parameters.

    Neither is checked here: `resolve_plugin` makes one of what a user writes.
    """

    name: str
    """Name of its entry point, as `fedsim list` shows it."""
    parameters: dict[str, Any] = {}
    """Parameter -> value, in the types of JSON; those left out have the plugin's defaults."""


class Partition(ScenarioSection):
    """Division of the training examples among clients; keys of other divisions are None."""

    name: Literal["iid", "dirichlet", "shards", "natural", "file"] = "iid"
    """`iid`: equal parts at random. `dirichlet`: each class in proportions from Dir(alpha).
    `shards`: cuts of the set sorted by class. `natural`: as the source knows. `file`: by `path`."""
    alpha: Positive | None = None
    """dirichlet: concentration; the smaller, the more clients differ."""
    shards_per_client: Count | None = None
    """shards: how many single-class shards a client holds."""
    path: str | None = None
    """file: CSV with columns `index,client`, or a JSON list with each training example's client."""


class Data(ScenarioSection):
    """Data that the clients train on, and their division."""

    source: PluginRef
    clients: Annotated[int, Field(ge=1, le=100_000)] = 4
    partition: Partition = Partition()


class RateSchedule(ScenarioSection):
    """Fall of the learning rate over the rounds; all local steps of a round have one rate."""

    name: Literal["step", "cosine"]
    """`step`: lr times `factor`^k after k times `every` rounds. `cosine`: lr times the half cosine
    that falls from 1 in the first round to `factor` in the last."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor of each fall under `step`, of the last round under `cosine`."""
    every: Count | None = None
    """step: number of rounds between two falls, required; None for `cosine`."""


class LocalSection(ScenarioSection):
    """Training of one client in one round."""

    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 1
    batch_size: Count = 4
    lr: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of sgd, which starts anew in each round; 0 for the other optimizers."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Rule of a step, as torch.optim has it, fresh in each round."""
    weight_decay: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    """Factor of the weights that is added to each gradient; adamw shrinks the weights instead."""
    schedule: RateSchedule | None = None
    """Fall of `lr` over the rounds. Default: none."""
    mode: Mode = "train"
    """Mode of the model: under `train`, batch norm takes its statistics from the batch."""
    batches: Batches = "different"
    """`same`: all steps of a round use one batch. `different`: each step has its own."""
    sampling: Sampling = "without_replacement"
    """How a client draws batches from its n examples. `without_replacement`: `batch_size` in each
    step. `epochs`: in a random order, anew in each epoch, as torch's DataLoader with shuffle and
    drop_last. `poisson`: each with probability batch_size / n. `balls_in_bins`: each in every b-th
    step from a random one on, b being n / batch_size, rounded. The latter two hide an example
    better under per-example noise; sizes of batches vary, and sums are divided by `batch_size`."""


class Training(ScenarioSection):
    """Training of the federation."""

    algorithm: Algorithm | None = None
    """Clients send a gradient (fedsgd) or the change of their weights (fedavg). Default: fedsgd for
    one plain local step (sgd without momentum and decay), fedavg otherwise."""
    rounds: Annotated[int, Field(ge=1, le=100_000)] = 3
    local: LocalSection = LocalSection()
    weights: str | None = None
    """Safetensors file of the model's weights before the first round: a checkpoint of fedsim
    (OUT/checkpoints/STACK.safetensors) or a state dict. Default: random ones."""
    projection_radius: Positive | None = None
    """fedsgd: after each step the server projects the weights onto the ball of this radius around
    those before the first round (L2, all tensors together). Default: no projection."""
    evaluate_every: Count = 1
    """Test the global model every so many rounds (and after the last)."""


class Federation(ScenarioSection):
    """Settings of who takes part, and of the engine that carries the messages."""

    engine: str = "local"
    """Where clients compute and how messages travel: an engine that `fedsim list engines` shows."""
    strategy: str = "FedAvg"
    """Class name of a strategy in flwr.serverapp.strategy."""
    strategy_parameters: dict[str, Any] = {}
    """Keyword arguments of the strategy's class; empty for its defaults."""
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of clients sampled each round (at least one)."""
    timeout: Positive = 600.0
    """Seconds after which a client's answer is late: it is left out and counted."""
    checkpoint_every: Count = 1
    """Rounds between checkpoints."""
    tls: bool = True
    """Whether the wire is encrypted, on which an eavesdropper listens (`observe.vantages`). Engines
    within one machine have no wire, and are treated as if they had one."""

    @property
    def clips_at_clients(self) -> bool:
        """Whether clients clip their updates to a norm that the strategy sends them each round."""
        return self.strategy == "DifferentialPrivacyClientSideAdaptiveClipping"

    @property
    def budget(self) -> float | None:
        """Largest ε that the strategy's accountant allows; None without accountant or limit."""
        accountant = self.strategy_parameters.get("accountant")
        if not isinstance(accountant, Mapping):
            return None
        budget: float | None = accountant.get("max_epsilon")
        return budget


class AttackEntry(ScenarioSection):
    """An attack to run on every recorded observation; `PluginRef` says more of its name."""

    name: str
    label: Slug | None = None
    """Distinguishes two entries of the same attack; default: the name."""
    restarts: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of runs from different starting points, of which that of least own loss counts."""
    blind: bool = False
    """Whether the attack is not told of the defenses and takes the update for an undefended one. A
    model that a defense alters, and the number of local steps, it still knows."""
    parameters: dict[str, Any] = {}


class Observe(ScenarioSection):
    """Settings of which updates are recorded; each of these is also attacked and scored."""

    rounds: Annotated[list[Annotated[int, Field(ge=1)] | Literal["last"]], Field(min_length=1)] = [
        "last"
    ]
    """Rounds that are recorded, counted from 1; `last` is the final one."""
    vantages: Annotated[list[Watcher], Field(min_length=1)] = ["server"]
    """Observers whose view is recorded. `server` sees what it decodes. `client`: each of `clients`
    sees the global models that it receives, and takes its own update off. `eavesdropper` sees the
    wire."""
    clients: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | Literal["all"] = [
        0
    ]
    """Clients, from 0, whose updates server and eavesdropper see, and that watch as `client`."""
    batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = None
    """Sizes of the batches of probes. Each observed client answers one probe per size and trial
    besides its training update, so that leakage can be compared across sizes. None: the training
    update itself is recorded. In a table, a probe of size b has each of the client's n rows with
    probability b / n, independently."""
    trials: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of independent batches per (round, client, batch size)."""
    releases: Annotated[int, Field(ge=1, le=10_000)] = 1
    """How often each probe is asked for, with the same batch at the same weights. The server
    records the mean, over which a defense's randomness averages out; the ledger counts every
    release."""
    candidates: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    """Number of each client's examples that membership attacks are asked about. A fair coin for
    each one decides whether its client trains on it. Attacks see the updates of all recorded rounds
    together. None: nobody is asked about."""
    plant: bool = False
    """Whether the server trains honestly, and plants the neurons of `model.head.planted` only in
    the weights that it sends with a probe. Else they are planted at the start and trained. The
    same for the imprint module of `model.imprint`, which starts out passing images as they are."""


class Privacy(ScenarioSection):
    """Settings of the ledger, which computes the ε that is claimed."""

    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """δ at which each ε is stated."""
    probes: Literal["included", "outside"] = "included"
    """Whether the ε of a run counts its probes. `outside`: only the auditor asks for them, they are
    no part of the deployment, and each ε is shown with that condition."""
    weights: Literal["undeclared", "public"] = "undeclared"
    """Origin of `training.weights`. `public`: no client's data had a part in them. Otherwise
    nothing is claimed of a federation that starts from them."""


class Audit(ScenarioSection):
    """Settings of an audit, which tests every stack's claimed ε by canaries, beside the run."""

    method: AuditMethod = "two_worlds"
    """`two_worlds`: one canary in many trainings of one client. `one_run`: many canaries in one run
    of all clients, which costs one run and shows no ε above about ln(canaries / 4.6)."""
    canaries: Annotated[int, Field(ge=200, le=10_000_000)] = 1000
    """Under `two_worlds`, number of trainings with the canary, and of as many without it. Under
    `one_run`, number of examples that are canaries; where a claim is on clients, all of them
    are."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Probability that a true claim is not refuted."""


class Scoring(ScenarioSection):
    """Settings by which answers of attacks are compared with the truth."""

    lpips_weights: str | None = None
    """Path of the backbone's weights for LPIPS; None: those that torchvision has here, if any."""
    lpips_backbone: Literal["alex", "vgg", "squeeze"] = "alex"
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Confidence of the intervals that the report shows."""


class Scenario(ScenarioSection):
    """Everything that determines a run: same scenario, same bytes."""

    name: Slug
    """Name of the run: up to 64 letters, digits and signs of `._+-`, so that it is a safe file
    name."""
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of data, weights, batches and noise. Whoever knows it can draw the noise again."""
    attack_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of what attacks draw. Attacks are handed this seed, and not `seed`."""
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "cpu"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: a GPU if there is one."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads that a training, and each attack, computes on. Their number decides in which order
    floats are summed, so it is the scenario's and not the machine's."""
    data: Data
    learner: PluginRef = PluginRef(name="sgd")
    """Learner, which says what clients compute from their data and what the server makes of it."""
    model: PluginRef | None = None
    """Network that learner sgd trains, or whose features learner ntk uses; others have none."""
    training: Training = Training()
    federation: Federation = Federation()
    defenses: Annotated[dict[Slug, list[PluginRef]], Field(min_length=1)] = {"none": []}
    """Stacks of defenses by a name of your own; the empty stack is the undefended federation."""
    attacks: list[AttackEntry]
    """Attacks, of which each is run on every recorded update of every stack."""
    observe: Observe = Observe()
    knowledge: Grant = Grant()
    privacy: Privacy = Privacy()
    audit: Audit | None = None
    """Settings of the audit; None for no audit."""
    scoring: Scoring = Scoring()

    @model_serializer(mode="wrap")
    def _without_the_usual(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Checkpoints name their scenario: those from before there were other learners stay valid.
        written: dict[str, Any] = write(self)
        unusual = {"learner": self.learner.name != "sgd", "model": self.model is not None}
        if self.observe.candidates is None and "observe" in written:
            written["observe"].pop("candidates", None)
        return {key: value for key, value in written.items() if unusual.get(key, True)}
