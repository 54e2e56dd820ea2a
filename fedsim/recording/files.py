"""Reads and writes observations on disk: safetensors for tensors, JSON for the rest.

Everything is written whole or not at all (temporary file, fsync, rename), so that a kill or a full
disk never leaves half a recording. What is missing, damaged or no recording is refused when it is
read, by a FedsimError; so is an id that is none, since it would be a path.

    ROOT/observations/<stack>/round-0001/global.safetensors        what the server had sent
    ROOT/observations/<stack>/round-0001/client-0000-b4-t0.*       one update: .safetensors, .json
    ROOT/public.safetensors                                        images of no client, if granted
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from pydantic import ConfigDict, ValidationError, create_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedsim.system import memory, paths
from fedsim.types import (
    MOST_STEPS,
    UNKNOWN,
    Augmentation,
    Effect,
    FedsimError,
    ModelSpec,
    Observation,
    ReleaseSpec,
    Tensors,
    Watcher,
)
from fedsim.words import number_of

_ID = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}/round-\d{4,6}/((client|participant|wire)-\d{4,6}|aggregate)(-training|-b\d+-t\d+)"
)
_KIND: Mapping[Watcher, str] = {"server": "client", "client": "participant", "eavesdropper": "wire"}
"""Watcher -> word before the client's number in the id of what it saw."""
GLOBAL = "global.safetensors"
"""Name of the file of a round's global weights, beside the round's observations."""
_PUBLIC = "public.safetensors"
_TORN = ".writing-"
_TENSORS = ("update", "buffers_update", "parameters", "buffers")
"""Fields of an observation that are safetensors files; all others are in the JSON beside them."""


def _sidecar_fields() -> Iterator[tuple[str, Any]]:
    """Yields name, type and default of each field of the JSON beside a recorded update."""
    yield "format", (Literal[1], 1)
    # Read from the class: a new field with a default is recorded, and old files stay legible.
    hints = get_type_hints(Observation, localns={"Tensor": Tensor})
    for field in fields(Observation):
        if field.name == "spec":
            yield "model", (ModelSpec | None, ...)
            # Of a closed-form release, which has no model.
            yield "release", (ReleaseSpec | None, None)
        elif field.name == "effect":
            # None of a recording that does not tell.
            yield "effect", (Effect | None, None)
        elif field.name not in _TENSORS:
            told = field.default is not MISSING
            yield field.name, (hints[field.name], field.default if told else ...)
    # Names in the model's order, which safetensors does not keep.
    yield "parameters", (tuple[str, ...], ...)
    yield "buffers", (tuple[str, ...], ...)
    yield "update_sha256", (str, ...)
    yield "global_sha256", (str, ...)


# A function of no known type: mypy would look for the fields of what `create_model` makes.
def _sidecar_model() -> Any:
    return create_model(
        "_Sidecar", __config__=ConfigDict(extra="forbid"), **dict(_sidecar_fields())
    )


_Sidecar = _sidecar_model()
_FACTS = tuple(
    name
    for name in _Sidecar.model_fields
    if name in Observation.__dataclass_fields__ and name not in _TENSORS
)
"""Fields of an observation that its JSON holds under the same name."""


def observation_id(
    stack: str, round: int, client: int, suffix: str, watcher: Watcher = "server"
) -> str:
    """Returns an observation's id, such as `<stack>/round-0001/client-0000-b4-t0`.

    Args:
        stack: Name of the defense stack.
        round: Number of the round, from 1.
        client: Number of the client, from 0; -1 for the aggregate.
        suffix: `training`, or batch size and trial of a probe, such as `b4-t0`.
        watcher: Who saw it: what a participant saw of others is called `participant-0000-...`, and
            what an eavesdropper saw `wire-0000-...`.

    Raises:
        FedsimError: a part has not this form, so that the id would be unsafe as a path.
    """
    who = "aggregate" if client < 0 else f"{_KIND[watcher]}-{client:04d}"
    return checked_id(f"{stack}/round-{round:04d}/{who}-{suffix}")


def path_of(root: Path, id: str) -> Path:
    """Returns the JSON file of observation `id` of the run in `root`; a bad id is a FedsimError."""
    return root / "observations" / f"{checked_id(id)}.json"


def save_observation(observation: Observation, root: Path) -> Path:
    """Writes `observation` below the run's folder `root`; returns the path of its JSON file.

    Global weights are written with the first observation of a round, and are not compared later. A
    FedsimError refuses a bad id, an OSError a file that cannot be written.
    """
    base = root / "observations" / checked_id(observation.id)
    shared = base.parent / GLOBAL
    if not shared.exists():
        state = {f"parameter.{n}": t for n, t in observation.parameters.items()}
        write_tensors(shared, state | {f"buffer.{n}": t for n, t in observation.buffers.items()})
    seen = {f"update.{n}": t for n, t in observation.update.items()}
    seen |= {f"buffer.{n}": t for n, t in observation.buffers_update.items()}
    update_digest = write_tensors(base.with_name(base.name + ".safetensors"), seen)
    sidecar = _Sidecar(
        **{name: getattr(observation, name) for name in _FACTS},
        **{"model": None, "release": None, observation.spec.field: observation.spec},
        parameters=tuple(observation.parameters),
        buffers=tuple(observation.buffers),
        update_sha256=update_digest,
        global_sha256=_sha256(shared),
    )
    # It is written last: a crash before leaves no observation that looks whole.
    path = base.with_name(base.name + ".json")
    write_text(path, sidecar.model_dump_json(indent=2) + "\n")
    return path


def load_observation(path: Path, device: str | torch.device = "cpu") -> Observation:
    """Reads a recording by the path of its `.json` or `.safetensors` file, tensors on `device`.

    Raises:
        FedsimError: there is no such recording, or it is damaged or contradicts itself.
    """
    if not path.name:
        raise FedsimError(
            f"{path}: no such recording; expected a .json file below a run's observations/"
        )
    asked, path = path, path.with_suffix(".json")
    try:
        sidecar = _Sidecar.model_validate_json(paths.text(path, paths.TEXT))
    except FileNotFoundError as error:
        said = "a folder" if asked.is_dir() else "no such recording"
        raise FedsimError(
            f"{asked}: {said}; expected a .json file below a run's observations/"
        ) from error
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise FedsimError(f"{path}: not a recording of fedsim: {error}") from error
    checked_id(sidecar.id)
    spec = sidecar.model or sidecar.release
    if spec is None:
        raise FedsimError(f"{path}: not a recording of fedsim: it names neither model nor release")
    seen = _read_verified(path.with_suffix(".safetensors"), sidecar.update_sha256, device)
    state = _read_verified(path.with_name(GLOBAL), sidecar.global_sha256, device)
    facts = {name: getattr(sidecar, name) for name in _FACTS}
    # Old files do not tell the effect: behind a defense it is unknown, without one there is none.
    facts["effect"] = sidecar.effect or (UNKNOWN if sidecar.defense else Effect())
    observation = Observation(
        **facts,
        spec=spec,
        update=_under("update.", seen, sidecar.parameters),
        buffers_update=_under("buffer.", seen, sidecar.buffers),
        parameters=_under("parameter.", state, sidecar.parameters),
        buffers=_under("buffer.", state, sidecar.buffers),
    )
    for wrong in _inconsistencies(observation, sidecar.parameters, sidecar.buffers):
        raise FedsimError(f"{path}: {wrong}; record it again")
    return observation


def save_public(images: Tensor, root: Path, labels: Tensor | None = None) -> None:
    """Writes the public images of the run in `root`, (P, C, H, W) uint8, or rows (P, D) float32.

    `labels` are their classes (P,) int64; None if these are not known.
    """
    write_tensors(
        root / _PUBLIC, {"images": images} | ({} if labels is None else {"labels": labels})
    )


@lru_cache(maxsize=1)
def load_public(root: Path) -> Tensor:
    """Reads public images (P, C, H, W), uint8, or rows (P, D), float32; not to be changed.

    Raises:
        FedsimError: the run in `root` recorded none, or the file holds anything else.
    """
    path = root / _PUBLIC
    if not path.exists():
        raise FedsimError(
            f"{path}: no public images were recorded; run the scenario with knowledge.public: test"
        )
    images = read_tensors(path).get("images")
    kinds = {(4, torch.uint8), (2, torch.float32)}
    if images is None or (images.ndim, images.dtype) not in kinds or not images.numel():
        raise FedsimError(f"{path}: not the public images of a run; run the scenario again")
    return images


def load_public_labels(root: Path) -> Tensor | None:
    """Reads the classes (P,) int64 of the public images of the run in `root`; None if unrecorded.

    A FedsimError is as in `load_public`, or says that the classes do not fit the images.
    """
    images, labels = load_public(root), read_tensors(root / _PUBLIC).get("labels")
    if labels is not None and (labels.dtype != torch.int64 or labels.shape != images.shape[:1]):
        raise FedsimError(f"{root / _PUBLIC}: not a label of each public image; run it again")
    return labels


def load_beside(path: Path, attacked: Observation) -> tuple[Observation, ...]:
    """Reads what the watcher of `attacked` saw of training up to its round, by round and client.

    A watcher at the vantage `aggregate` or `client` saw one update a round, others all clients'.
    `path` is the JSON file of `attacked`. Tensors are on the CPU; weights that several recordings
    start from are held once. Errors are those of `load_observation`.
    """
    seen: list[Observation] = []
    for other in paths_beside(path, attacked):
        each = load_observation(other)
        if seen and seen[-1].round == each.round:
            each = replace(each, parameters=seen[-1].parameters, buffers=seen[-1].buffers)
        seen.append(each)
    return tuple(seen)


def paths_beside(path: Path, attacked: Observation) -> list[Path]:
    """Returns the JSON files that `load_beside` reads for the same arguments, in its order."""
    kind = path.stem.partition("-")[0]
    alone = attacked.vantage in ("client", "aggregate")
    return [
        other
        for folder in sorted(path.parent.parent.glob("round-*"), key=by_number)
        # Folders after the attacked round hold what was not seen yet.
        if int(folder.name.removeprefix("round-")) <= attacked.round
        for other in sorted(folder.glob(f"{kind}-*training.json"), key=by_number)
        if not alone or other.name == path.name
    ]


def by_number(path: Path) -> tuple[int, str]:
    """Returns a sort key by which `client-9999` comes before `client-10000`."""
    return len(path.name), path.name


def root_of(recording: Path) -> Path | None:
    """Returns the run's folder, above `observations/`, of a recording; None if it lies in none."""
    for parent in recording.resolve().parents:
        if parent.name == "observations":
            return parent.parent
    return None


def write_tensors(path: Path, tensors: Tensors) -> str:
    """Writes `serialize(tensors)` by `write_bytes`, for its owner alone; returns its SHA-256."""
    content = serialize(tensors)
    write_bytes(path, content, private=True)
    return hashlib.sha256(content).hexdigest()


def serialize(tensors: Tensors) -> bytes:
    """Returns tensors on any device as a safetensors file's bytes; a dtype it lacks: KeyError."""
    own: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, as granted labels do with the true ones
        own[name] = value.clone() if storage in storages else value
        storages.add(storage)
    content: bytes = save(own)
    return content


def read_tensors(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Returns the tensors in a safetensors file, by name, on `device`.

    Raises:
        FedsimError: the file is missing, damaged, or too large for the memory.
    """
    try:
        whole = paths.regular(path, memory.limit())
        with safe_open(whole, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise FedsimError(f"{path}: cannot be read as safetensors: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8, whole or not at all; errors are as in `write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Writes `value` as JSON by `write_bytes`; NaN or ∞ is a ValueError, no JSON a TypeError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def copy_file(path: Path, source: Path, target: Path) -> None:
    """Copies `path` from below `source` to the same place below `target`, for its owner alone.

    A FedsimError refuses links and what is no regular file, an OSError one that is missing.
    """
    place = path.relative_to(source)
    content = paths.content(paths.refuse_links(path, source), memory.limit())
    write_bytes(target / place, content, private=True)


def write_bytes(path: Path, content: bytes, *, private: bool = False, durable: bool = True) -> None:
    """Writes `content` whole or not at all.

    Args:
        path: Path of the file, whose folder is made.
        content: Its bytes.
        private: Whether the file's owner alone can read it.
        durable: Whether the file is on the disk when this returns; else a crash may tear it.

    Raises:
        OSError: the file cannot be written.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The name is drawn, since several processes may write the same file at once.
        temporary = path.with_name(_TORN + secrets.token_hex(8))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        # The system takes off what the umask forbids.
        handle = os.open(temporary, flags, 0o600 if private else 0o644)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    # Before the rename: a crash could else leave the name without content.
                    os.fsync(file.fileno())
            temporary.replace(path)
        # Ctrl-C leaves no torn file either.
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises an OSError of its `with` block anew with `path` as the file that it names."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def remove_rounds(folder: Path, last: int) -> None:
    """Removes the folders (`round-0001` and so on) of rounds after `last` from `folder`."""
    for path in folder.glob("round-*"):
        number = path.name.removeprefix("round-")
        if number.isdecimal() and int(number) > last and path.is_dir():
            shutil.rmtree(path)


def remove_torn(root: Path) -> None:
    """Removes the temporary files of interrupted writes below `root`; nobody may be writing."""
    for torn in root.rglob(f"{_TORN}*"):
        torn.unlink()


def _read_verified(path: Path, digest: str, device: str | torch.device) -> dict[str, Tensor]:
    # A missing file is left to `read_tensors`, whose error says so.
    if path.is_file() and _sha256(path) != digest:
        raise FedsimError(f"{path}: does not match the checksum in its recording; record it again")
    return read_tensors(path, device)


def _sha256(path: Path) -> str:
    # The time is part of the cache's key, so that a file that was altered is read again.
    return _digest(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _digest(path: Path, _modified: int) -> str:
    # Cached: every observation of a round names the digest of the same global weights.
    with paths.open_regular(path, memory.limit()) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _under(prefix: str, tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: tensors[prefix + name] for name in names if prefix + name in tensors}


def checked_id(id: str) -> str:
    """Returns an observation's `id`, safe as a path; a FedsimError refuses any other text."""
    if not _ID.fullmatch(id) or ".." in id:
        raise FedsimError(f"{id!r} is not the id of an observation")
    return id


_CANDIDATES, _STEP = 8, 1 << 14
"""Number of tensors of images that an attack holds, and bytes that it keeps of a local step."""
_MOST = 1_000_000
"""Maximum of every other count in a recording."""


def _inconsistencies(
    seen: Observation, parameters: Collection[str], buffers: Collection[str]
) -> Iterator[str]:
    """Yields a text for each fault by which a recording that lists these names misleads attacks."""
    training = seen.training
    if not 1 <= training.steps <= MOST_STEPS:
        yield f"training.steps: expected 1 to {MOST_STEPS}, got {training.steps}"
    for name, count in (
        ("training.batch_size", training.batch_size),
        ("num_clients", seen.num_clients),
        ("releases", seen.releases),
    ):
        if not 1 <= count <= _MOST:
            yield f"{name}: expected 1 to {_MOST}, got {count}"
    for name, value in (("lr", training.lr), ("momentum", training.momentum)):
        # The chain is false for NaN as well.
        if not 0 <= value < math.inf or (name == "lr" and not value):
            yield f"training.{name}: expected a finite number above 0, got {value}"
    if seen.payload == "update":
        spec = seen.model
        channels, shape = spec.input_shape[0], spec.input_shape
        if not (min(shape) >= 1 and max(shape) <= _MOST):
            yield f"model.input_shape: expected 1 to {_MOST} each, got {shape}"
        if not 1 <= spec.num_classes <= _MOST:
            yield f"model.num_classes: expected 1 to {_MOST}, got {spec.num_classes}"
        for name, values in (("mean", spec.mean), ("std", spec.std)):
            good = all(map(math.isfinite, values)) and (name == "mean" or min(values) > 0)
            if len(values) != channels or not good:
                yield f"model.{name}: expected {channels} finite numbers, got {values}"
        # An attack holds its candidates, their gradient, its optimizer's state and what their
        # update is computed of, for each step that it goes through.
        images = seen.num_images * math.prod(spec.input_shape)
        for change in seen.effect.batch:
            if isinstance(change, Augmentation):
                images *= max(1, len(change.views))
        weights = sum(tensor.numel() for tensor in seen.parameters.values())
        needed = _CANDIDATES * 4 * images + training.steps * (8 * weights + _STEP)
        if needed > memory.limit():
            yield (
                "training.steps, training.batch_size, num_clients, model.input_shape: an attack "
                f"on {number_of(seen.num_images, 'image')} in {number_of(training.steps, 'step')} "
                f"takes about {needed / paths.GIB:.1f} GiB, and there are "
                f"{memory.limit() / paths.GIB:.1f}"
            )
    # Names without tensors were dropped on loading, so that each one is looked for here.
    for name in parameters:
        before, update = seen.parameters.get(name), seen.update.get(name)
        if before is None or update is None:
            yield f"parameter {name}: named, but not recorded"
        elif before.shape != update.shape or not update.is_floating_point():
            yield (
                f"parameter {name}: expected an update of {tuple(before.shape)} floating-point "
                f"numbers, got {tuple(update.shape)} of {update.dtype}"
            )
    if not parameters:
        yield "no parameters are named"
    if lost := set(buffers) - set(seen.buffers):
        yield f"buffer {min(lost)}: named, but not recorded"
