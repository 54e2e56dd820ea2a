"""Makes controls: the same attack's answer to another update, scored against this one's truth.

If that is as good, pictures come from the attack's prior. The other update is another client's,
else one of public images, else another batch's, and of other images by their content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsim import rng, scoring
from fedsim.attacking.jobs import reconstruction_path
from fedsim.contracts.target import main_target
from fedsim.recording.files import load_observation, path_of, read_tensors, save_observation
from fedsim.recording.truth import save_truth
from fedsim.results.record import CONTROL, Row
from fedsim.training.client import Client, split_candidates
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.types import Dataset, FedsimError

Cell = tuple[Any, ...]
"""(stack, attack label, vantage, batch size, round)."""


def folder_of(root: Path) -> Path:
    """Returns the folder, in a run's `root`, of controls that were made of public images."""
    return root / CONTROL


def _cells(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups scored rows by cell; the control of a row is another row of its group."""
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            stack, attack = row["defense"]["name"], row["attack"]["label"]
            cell = (stack, attack, row["vantage"], row["batch_size"], row["round"])
            cells.setdefault(cell, []).append(row)
    return list(cells.values())


def _made_of_public(members: Sequence[Row], root: Path) -> Path | None:
    """Returns the file of a reconstruction of public images for `members`, the rows of a cell."""
    for row in members:
        path = reconstruction_path(folder_of(root), row["attack"]["label"], row["observation"])
        if path.exists():
            return path
    return None


def record_public(
    rows: Sequence[Row], root: Path, servers: Mapping[str, Server]
) -> list[tuple[str, Path]]:
    """Records updates of public images for lines of results without another client's update.

    `rows` are those of the run `root`, and `servers` has one for each stack. The files lie below
    `folder_of(root)`. The result has (attack label, the recording's JSON file) of each attack run
    that is still missing, if an update could be made. A damaged recording is a FedsimError.
    """
    asked = []
    for members in _cells(rows):
        first = members[0]
        # Another client's update is the better control: public images serve where there is none.
        alone = {row["client"] for row in members} == {first["client"]}
        if first["release"] or not alone or first["vantage"] not in ("server", "eavesdropper"):
            continue
        if _made_of_public(members, root):
            continue
        path = path_of(folder_of(root), first["observation"])
        if path.exists() or _record(first, root, servers[first["defense"]["name"]]):
            asked.append((first["attack"]["label"], path))
    return asked


def _record(row: Row, root: Path, server: Server) -> bool:
    """Records an update of public images in the place of a row's; returns whether it could."""
    data = server.described
    if not isinstance(data, Dataset) or server.stack.aggregation is not None:
        return False  # a masked part of a sum shows nothing by itself
    seen = load_observation(path_of(root, row["observation"]))
    public = replace(data, train_images=data.test_images, train_labels=data.test_labels)
    # The client holds the test split; stack and weights are the server's own.
    seed, own = rng.derive(server.scenario.seed, "control"), torch.arange(len(data.test_images))
    client = Client(number=seen.client, dataset=public, own=own, seed=seed)
    if asked := server.scenario.observe.candidates:
        asked = min(asked, len(own) // 2)
        try:
            (split,) = split_candidates([own], public.inputs, asked, seed)
        except FedsimError:  # too few of the public images have no copy
            return False
        kept = own[~torch.isin(own, split.held_out)]
        client = replace(client, own=kept, candidates=split)
    probe = Probe(batch_size=row["batch_size"], trial=row["trial"])
    ask = partial(client.update, server, seen.round, seen.parameters, seen.buffers, {})
    try:
        results = [ask(probe=replace(probe, release=k)) for k in range(seen.releases)]
    except Exception:  # too few public images; a third party's defense may raise anything
        return False
    first, truth = results[0].update, results[0].truth
    if truth is None:
        return False
    # Releases are averaged as in the row's recording; integer tensors have no mean.
    mean = {
        name: torch.stack([each.update.tensors[name] for each in results]).mean(0)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in first.tensors.items()
    }
    # The control shows no more than the recording does.
    buffers = first.buffers if seen.buffers_update else {}
    save_truth(truth, folder_of(root), seen.id, seen.client)
    save_observation(replace(seen, update=mean, buffers_update=buffers), folder_of(root))
    return True


def add_controls(rows: Sequence[Row], root: Path) -> None:
    """Sets `control` of each scored row of the run `root`: how an answer to another update scores.

    `rows`, which are all of the run, change in place, but for those without another update. A
    damaged reconstruction is a FedsimError.
    """
    for members in _cells(rows):
        public = _made_of_public(members, root)
        for place, row in enumerate(members):
            # In turn from the next one on, so that each row is the control of another.
            others = members[place + 1 :] + members[:place]
            release = row["release"]
            if not main_target(release["kind"] if release else "update").asked_singly:
                row["control"] = _control_of_batch(row, others, public, root) or row["control"]
            elif others:
                row["control"] = _control_of_rows(row, others[0], root)


def _control_of_batch(
    row: Row, others: Sequence[Row], public: Path | None, root: Path
) -> Row | None:
    own = read_tensors(_reconstruction(row, root))
    # Of several others the next one, as trials of a client follow each other.
    unlike = [each for each in others if _unlike(row, each)]
    # `min` takes the first of the least: another client's if there is one, else this client's next.
    other = min(unlike, key=lambda each: each["client"] == row["client"], default=None)
    foreign = other and read_tensors(_reconstruction(other, root))
    of = "client" if other and other["client"] != row["client"] else "batch"
    # A public image that is the row's own would make the control as good as the attack.
    if of == "batch" and public and not _shares_image(own, drawn := read_tensors(public)):
        of, foreign = "public", drawn
    if not foreign:
        return None
    scores = scoring.score_other(own, foreign, [])
    values = iter(scores.per_image.get("psnr", []))
    order = scores.assignment
    psnr = [None if k == scoring.MISSING else next(values, None) for k in order]
    return {"of": of, "other_update": scores.metrics(), "per_image": {"psnr": psnr}}


def _shares_image(own: Mapping[str, Tensor], public: Mapping[str, Tensor]) -> bool:
    return any(
        torch.equal(one, each)
        for name in ("truth", "truth_records")
        if name in own and name in public
        for one in own[name]
        for each in public[name]
    )


def _unlike(row: Row, other: Row) -> bool:
    """Returns whether `other` may be the control of `row`: the two share no true image."""
    return not set(row["victims"]) & set(other["victims"])


def _control_of_rows(row: Row, other: Row, root: Path) -> Row:
    pairs = _other_targets(row["victims"], other["victims"])
    if pairs is None:
        return {"of": None, "other_update": None, "per_image": {}}
    own, foreign = (read_tensors(_reconstruction(each, root)) for each in (row, other))
    scores = scoring.score_other(own, foreign, pairs)
    return {"of": "release", "other_update": scores.metrics(), "per_image": {}}


def _other_targets(own: Sequence[str], other: Sequence[str]) -> list[int] | None:
    """Pairs each of `own` with one of `other` that is not the same; None if one has no such."""
    found = []
    for place, victim in enumerate(own):
        # Releases share rows: the row at the same place may be this very one.
        turns = [(place + step) % len(other) for step in range(len(other))]
        unlike = next((turn for turn in turns if other[turn] != victim), None)
        if unlike is None:
            return None
        found.append(unlike)
    return found or None


def _reconstruction(row: Row, root: Path) -> Path:
    return reconstruction_path(root, row["attack"]["label"], row["observation"])
