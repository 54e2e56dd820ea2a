"""Faults that made leakage numbers wrong, as changes of the source that put each one back.

A fault counts as met only if the fast suite fails with it: `test_mutations.py` applies each to a
copy of the project and runs the tests that are named. `old` stands exactly once in `file`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One fault, put back by exchanging `old` for `new` in `file`."""

    name: str
    """What is wrong then, in a few words."""
    item: int
    """Section of docs/refuted.md."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Files or node ids of the fast tests of which at least one fails then."""


ROAD = "tests/validity/test_road.py"
SENSITIVITY = "tests/validity/test_sensitivity.py"

SEEDS = "tests/validity/test_seeds.py"
CLAIMS = "tests/validity/test_claims.py"
BOARD = "tests/validity/test_leaderboard.py"
EFFECTS = "tests/validity/test_effects.py"
ASSUMPTIONS = "tests/validity/test_assumptions.py"
THREADS = "tests/validity/test_threads.py"
MATCHED = "tests/attacks/gradient_matching/test_matched_tensors.py"

GUESS = "tests/scoring/test_guess.py"
VICTIMS = "tests/validity/test_victims.py"

STATED = "tests/validity/test_stated_epsilon.py"

FOREIGN = "tests/validity/test_foreign_attacks.py"

CERTIFICATES = "tests/validity/test_false_certificates.py"

BAD_INPUT = "tests/test_bad_input.py"
EXTREMES = "tests/privacy/test_extremes.py"
MUTATIONS = (
    Mutation(
        name="a certificate that uses the truth",
        item=16,
        file="fedsim/scoring/certificates.py",
        old='        certified=told.get("certified"),\n',
        new='        certified=told.get("certified", 0) - (false_certificates(found, truth) or 0)\n'
        "        if truth\n"
        "        else None,\n",
        tests=(CERTIFICATES,),
    ),
    Mutation(
        name="a loosened bound of what a certified answer leaves",
        item=16,
        file="attacks/classifier_features/_certificates.py",
        old="    return (_ROUNDING * classifier.rounding) ** 2\n",
        new="    return (1e5 * classifier.rounding) ** 2\n",
        tests=(CERTIFICATES, "tests/attacks/classifier_features/test_certified_images.py"),
    ),
    Mutation(
        name="classes that no image is taken for speak for a certificate",
        item=16,
        file="attacks/classifier_features/_certificates.py",
        old="    rows = rows[1:] / rows.square().sum().sqrt()\n",
        new="    rows = torch.ones_like(rows[1:])\n",
        tests=("tests/attacks/classifier_features/test_certified_images.py",),
    ),
    Mutation(
        name="a lost trial makes exact pictures unseen",
        item=16,
        file="fedsim/report/level.py",
        old='    return "partial" if (certain > 0 and several) or row.exposed else "unseen"\n',
        new='    return "partial" if certain > 0 and several else "unseen"\n',
        tests=(BOARD,),
    ),
    Mutation(
        name="a neuron at the kink is decided by rounding",
        item=5,
        file="attacks/head_features/activation_features.py",
        old="        if bool((input_ > -slack).all()) and bool(explained):\n",
        new="        if bool((input_ > 0).all()) and bool(explained):\n",
        tests=("tests/attacks/head_features/test_feature_attacks.py",),
    ),
    Mutation(
        name="divergences beyond what rounding leaves of them",
        item=10,
        file="fedsim/privacy/ledger.py",
        old="    multiplier = min(multiplier, _AMPLIFIED[1])\n",
        new="    multiplier = min(multiplier, 1e12)\n",
        tests=(EXTREMES,),
    ),
    Mutation(
        name="a curve of losses without its rounding",
        item=10,
        file="fedsim/privacy/composition/poisson.py",
        old="    losses = distribution(sampling_rate, min(noise, _MOST_NOISE), steps)\n",
        new="    losses = distribution(sampling_rate, min(noise, _MOST_NOISE), 1)\n",
        tests=(EXTREMES,),
    ),
    Mutation(
        name="participations counted at the least of each group",
        item=10,
        file="fedsim/privacy/composition/correlated.py",
        old="    mass = np.diff(below, prepend=0.0)\n",
        new="    mass = np.diff(below, append=1.0)\n",
        tests=(EXTREMES,),
    ),
    Mutation(
        name="a NaN in a line of results",
        item=15,
        file="fedsim/results/record.py",
        old="    return json.loads(line, parse_constant=_no_number, parse_float=_finite)\n",
        new="    return json.loads(line)\n",
        tests=(BAD_INPUT,),
    ),
    Mutation(
        name="a device read as a file",
        item=15,
        file="fedsim/system/paths.py",
        old='    (stat.S_ISCHR, "a device"),\n',
        new="",
        tests=("tests/system/test_paths.py",),
    ),
    Mutation(
        name="a file opened beside the one way",
        item=15,
        file="fedsim/privacy/mechanisms/normal.py",
        old="json.loads(paths.text(path, paths.TEXT))",
        new="json.loads(path.read_text())",
        tests=("tests/system/test_paths.py",),
    ),
    Mutation(
        name="a model built before it is counted",
        item=15,
        file="fedsim/models/size.py",
        old="        memory.check(_COPIES * size.state, content,",
        new="        memory.check(0, content,",
        tests=(BAD_INPUT,),
    ),
    Mutation(
        name="noise of the server used again for another sum",
        item=4,
        file="fedsim/federation/tap.py",
        old="            use_once(path, asked(self._round, probe), [combined.tensors], "
        '"the server")\n',
        new="            pass\n",
        tests=("tests/federation/test_federation_tap.py",),
    ),
    Mutation(
        name="noise used again at other weights",
        item=4,
        file="fedsim/federation/noise_use.py",
        old="    if before and at not in before:\n",
        new="    if False:\n",
        tests=("tests/federation/test_federation_client.py",),
    ),
    Mutation(
        name="a learner that steps around the stack",
        item=1,
        file="fedsim/training/refusals.py",
        old="    if claimed and not stack.directed:\n",
        new="    if claimed and False:\n",
        tests=(STATED,),
    ),
    Mutation(
        name="a clipped gradient above its bound by rounding",
        item=1,
        file="defenses/per_example.py",
        old="torch.where(norms > norm * slack,",
        new="torch.where(norms > norm,",
        tests=(STATED,),
    ),
    Mutation(
        name="a mean of very many examples in float32",
        item=1,
        file="defenses/per_example.py",
        old="torch.zeros_like(value, dtype=torch.float64)",
        new="torch.zeros_like(value)",
        tests=(STATED,),
    ),
    Mutation(
        name="a claim beside tensors that no defense acts on",
        item=1,
        file="fedsim/privacy/ledger.py",
        old="    if unprotected:\n",
        new="    if False:\n",
        tests=(STATED,),
    ),
    Mutation(
        name="a claim on noise that rounding swallows",
        item=10,
        file="fedsim/privacy/ledger.py",
        old="_LARGEST = 1e9\n",
        new="_LARGEST = math.inf\n",
        tests=(STATED,),
    ),
    Mutation(
        name="images in the order of their classes",
        item=1,
        file="fedsim/data/folder.py",
        old="(item.client, item.name, item.class_name)",
        new="(item.class_name, item.client, item.name)",
        tests=(SENSITIVITY,),
    ),
    Mutation(
        name="a claim where labels decide on places",
        item=1,
        file="fedsim/training/source.py",
        old="    if placed and partition in _BY_PLACE and",
        new="    if placed and not partition and",
        tests=(SENSITIVITY,),
    ),
    Mutation(
        name="a claim behind a limit by classes",
        item=1,
        file="fedsim/data/folder.py",
        old="((_LIMIT,) if cut else ())",
        new="()",
        tests=(SENSITIVITY,),
    ),
    Mutation(
        name="an epsilon rounded down where it is written",
        item=3,
        file="fedsim/report/figures.py",
        old="_rounded(epsilon, 3, ROUND_CEILING)",
        new="_rounded(epsilon, 3, ROUND_HALF_EVEN)",
        tests=(STATED,),
    ),
    Mutation(
        name="a sketch drawn from 32 bits",
        item=4,
        file="fedsim/learners/closed_form.py",
        old="self.value(rows, request.stream)",
        new="self.value(rows, torch.Generator().manual_seed(request.stream.initial_seed()))",
        tests=(STATED,),
    ),
    Mutation(
        name="a run computes on as many threads as its machine likes",
        item=12,
        file="fedsim/system/threads.py",
        old="    before = torch.get_num_threads()\n",
        new="    before = threads = torch.get_num_threads()\n",
        tests=(THREADS,),
    ),
    Mutation(
        name="a worker computes on as many threads as its machine likes",
        item=12,
        file="fedsim/attacking/question.py",
        old="    threads.fix(around.threads)\n",
        new="",
        tests=(THREADS,),
    ),
    Mutation(
        name="two runs fill one folder",
        item=14,
        file="fedsim/pipeline.py",
        old="            until_the_end.enter_context(locked(root))\n",
        new="",
        tests=("tests/system/test_processes.py::test_a_folder_in_use_is_refused",),
    ),
    Mutation(
        name="a run overwrites one that came in between",
        item=14,
        file="fedsim/pipeline.py",
        old="                plan.refuse_other_run()\n",
        new="                pass\n",
        tests=(
            "tests/system/test_processes.py::test_a_folder_that_filled_up_in_the_meantime_is_refused",
        ),
    ),
    Mutation(
        name="one image guessed for all of a batch",
        item=7,
        file="fedsim/scoring/guess.py",
        old="        levels = everything.guess(chosen, count)\n",
        new='        levels = everything.guess("mean_image", count)\n',
        tests=(GUESS, VICTIMS),
    ),
    Mutation(
        name="the guess ignores granted labels",
        item=7,
        file="fedsim/attacking/jobs.py",
        old='    known = truth.labels.tolist() if setting.granted.labels == "known" else None\n',
        new="    known = None\n",
        tests=(VICTIMS,),
    ),
    Mutation(
        name="what is filled in comes of the truth",
        item=7,
        file="fedsim/attacking/jobs.py",
        old="    return scoring.score(found, truth, lpips=lpips, guess=setting.guesser.mean)\n",
        new="    fill = truth.images.mean(0)\n"
        "    return scoring.score(found, truth, lpips=lpips, guess=fill)\n",
        tests=(VICTIMS,),
    ),
    Mutation(
        name="few public images are learned by heart",
        item=7,
        file="fedsim/scoring/guess_pool.py",
        old="        return [*plain, learned] if count <= _MAX_LEARNED else plain\n",
        new="        return [learned]\n",
        tests=(GUESS,),
    ),
    Mutation(
        name="victims drawn anew in each trial",
        item=11,
        file="fedsim/data/batches.py",
        old="    start = (step * trials + trial) * batch_size\n",
        new="    start = 0\n",
        tests=(VICTIMS,),
    ),
    Mutation(
        name="victims drawn independently in each trial",
        item=11,
        file="fedsim/training/client.py",
        old="            if probe and (own := "
        "self._victims(training, round, probe, step, trials)) is not None:\n",
        new="            if probe and (own := None) is not None:\n",
        tests=(VICTIMS,),
    ),
    Mutation(
        name="more trials than images",
        item=11,
        file="fedsim/training/client.py",
        old="        if trials * needed > held:\n",
        new="        if False:\n",
        tests=(VICTIMS,),
    ),
    Mutation(
        name="the same image held twice is two victims",
        item=11,
        file="fedsim/data/batches.py",
        old="        first.setdefault(streams.of_bytes(content), index)\n",
        new="        first.setdefault(index + 0 * streams.of_bytes(content), index)\n",
        tests=(VICTIMS,),
    ),
    Mutation(
        name="another update of the same image",
        item=11,
        file="fedsim/results/rows.py",
        old='    return "members" in own or not set(row["victims"]) & set(other["victims"])\n',
        new="    return True\n",
        tests=(VICTIMS,),
    ),
    Mutation(
        name="another release of the same row",
        item=11,
        file="fedsim/results/rows.py",
        old="if other[turn] != victim",
        new="if other[turn]",
        tests=(VICTIMS,),
    ),
    Mutation(
        name="n counts runs",
        item=11,
        file="fedsim/report/leaderboard.py",
        old="    first, trials = rows[0], units(rows)\n",
        new="    first, trials = rows[0], [[i] for i in range(len(rows))]\n",
        tests=(VICTIMS,),
    ),
    Mutation(
        name="runs of other seeds are dropped as copies",
        item=11,
        file="fedsim/results/reading.py",
        old='    rows = {(str(run.setting("seed")), '
        "row.identity): row for run in runs for row in run.rows}\n",
        new="    rows = {row.identity: row for run in runs for row in run.rows}\n",
        tests=(VICTIMS,),
    ),
    Mutation(
        name="labels alone are guessed by the majority",
        item=7,
        file="fedsim/scoring/guess.py",
        old="        alone = _likeliest(self._labels, "
        "count) if granted is None else torch.tensor(granted)\n",
        new="        alone = self._labels.bincount().argmax().repeat(count)\n",
        tests=(GUESS,),
    ),
    Mutation(
        name="a control without the attack's stretching",
        item=7,
        file="attacks/gradient_matching/prior_only.py",
        old="        images = exposed(state.best, state.drawing.box) if self.stretched "
        "else state.best\n",
        new="        images = state.best\n",
        tests=("tests/attacks/gradient_matching/test_prior_only.py",),
    ),
    Mutation(
        name="an interval of 90% that is labelled 95%",
        item=7,
        file="fedsim/scoring/statistics.py",
        old="t.ppf((1 + confidence) / 2, freedom)",
        new="t.ppf(0.95 if confidence == 0.95 else (1 + confidence) / 2, freedom)",
        tests=("tests/scoring/test_statistics.py",),
    ),
    Mutation(
        name="intervals of two values",
        item=7,
        file="fedsim/scoring/statistics.py",
        old="LEAST = 3\n",
        new="LEAST = 2\n",
        tests=("tests/scoring/test_statistics.py",),
    ),
    Mutation(
        name="an own attack blind to noise",
        item=6,
        file="attacks/head_features/_head_gradient.py",
        old="            noisy=effect.noisy,\n",
        new="            noisy=False,\n",
        tests=(EFFECTS,),
    ),
    Mutation(
        name="an own attack blind to pruning",
        item=6,
        file="attacks/head_features/_head_gradient.py",
        old="            pruned=effect.removed is not None,\n",
        new="            pruned=False,\n",
        tests=(EFFECTS,),
    ),
    Mutation(
        name="bounds of removed entries ignored",
        item=6,
        file="attacks/images_from_features/_part_update.py",
        old="    if removed is None or observation.effect.noisy:\n",
        new="    if removed:\n",
        tests=(EFFECTS,),
    ),
    Mutation(
        name="a stack that drops what a second defense does",
        item=6,
        file="fedsim/types.py",
        old="            noise=self.noise + after.noise,\n",
        new="            noise=self.noise or after.noise,\n",
        tests=(EFFECTS,),
    ),
    Mutation(
        name="a foreign defense is taken for none",
        item=6,
        file="fedsim/types.py",
        old="UNKNOWN = Effect(known=False)\n",
        new="UNKNOWN = Effect()\n",
        tests=(EFFECTS,),
    ),
    Mutation(
        name="a failed attack marked strongest",
        item=13,
        file="fedsim/report/row.py",
        old="        return (float(self.n_ok > 0), float(not self.blind), *self.strength)\n",
        new="        return (float(not self.blind), *self.strength)\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="all failed, and one marked",
        item=13,
        file="fedsim/report/leaderboard.py",
        old="        works = line.n_ok > 0 and not line.blind\n",
        new="        works = not line.blind\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="chance is taken for learning",
        item=13,
        file="fedsim/scoring/accuracy.py",
        old="        return self.low <= self.chance\n",
        new="        return self.share < self.chance\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="one invalid comparison marks another",
        item=13,
        file="fedsim/report/render.py",
        old='        "valid": row.comparison not in invalid,\n',
        new='        "valid": not invalid,\n',
        tests=(BOARD,),
    ),
    Mutation(
        name="assumptions that the data contradict are believed",
        item=3,
        file="fedsim/training/refusals.py",
        old="    _assumed(workload)\n",
        new="",
        tests=(ASSUMPTIONS,),
    ),
    Mutation(
        name="rows longer than their bound",
        item=3,
        file="fedsim/types.py",
        old="        beyond = ~(norms <= self.row_norm * (1 + _ROUNDING))\n",
        new="        beyond = norms < 0\n",
        tests=(ASSUMPTIONS,),
    ),
    Mutation(
        name="a probe carries the training's batch size",
        item=2,
        file="fedsim/training/accounting.py",
        old="        declared = server.declared_of(seen.training.batch_size)\n",
        new="        declared = server.declared\n",
        tests=(CLAIMS,),
    ),
    Mutation(
        name="probes are left out of the run's claim",
        item=2,
        file="fedsim/training/accounting.py",
        old="            probes=account.probed(most.probed) if probes else (),\n",
        new="",
        tests=(CLAIMS,),
    ),
    Mutation(
        name="an epsilon without its unit, relation and delta",
        item=3,
        file="fedsim/report/figures.py",
        old="    return f\"{format_epsilon(epsilon)} ({', '.join(words)})\"\n",
        new="    return format_epsilon(epsilon)\n",
        tests=(CLAIMS,),
    ),
    Mutation(
        name="the scenario's seed in every observation",
        item=4,
        file="fedsim/training/server.py",
        old="            seed=self.scenario.attack_seed,\n",
        new="            seed=self.scenario.seed,\n",
        tests=(SEEDS,),
    ),
    Mutation(
        name="streams of 32 bits",
        item=4,
        file="fedsim/rng.py",
        old="        self.set_state(_mersenne_state(material))\n",
        new="        self.manual_seed(int.from_bytes(hashlib.sha256(material).digest()[:4]))\n",
        tests=(SEEDS,),
    ),
    Mutation(
        name="noise from the generator of simulations",
        item=4,
        file="fedsim/contracts/defense.py",
        old="    noise = normal(tensor.shape, rng, wide)\n",
        new="    noise = torch.randn(tensor.shape, generator=rng, dtype=wide)\n",
        tests=(SEEDS,),
    ),
    Mutation(
        name="clients' images normalize clients' images",
        item=1,
        file="fedsim/data/folder.py",
        old='        if self.normalization == "declared":\n            return dataset\n',
        new="",
        tests=(SENSITIVITY,),
    ),
    Mutation(
        name="private statistics void nothing",
        item=1,
        file="fedsim/privacy/ledger.py",
        old="    moving = (private_statistics or {}).get(held.mechanism.unit, ())\n",
        new="    moving = ()\n",
        tests=(SENSITIVITY,),
    ),
    Mutation(
        name="a source that does not say is believed",
        item=1,
        file="fedsim/training/source.py",
        old='        found = (f"data source {dataset.name} does not declare '
        '{kind}.private_statistics",)\n',
        new="        found = ()\n",
        tests=(SENSITIVITY,),
    ),
    Mutation(
        name="weights of unknown origin are believed",
        item=1,
        file="fedsim/training/source.py",
        old="        found += (_WEIGHTS,)\n",
        new="        pass\n",
        tests=(SENSITIVITY,),
    ),
    Mutation(
        name="an audit's worlds share their statistics",
        item=1,
        file="fedsim/training/workload.py",
        old="        prepared = data_source(self.scenario).prepared(dataset)\n",
        new="        prepared = dataset\n",
        tests=(SENSITIVITY,),
    ),
    Mutation(
        name="digits normalized by their own mean",
        item=1,
        file="fedsim/data/bundled.py",
        old="        mean=mean,\n",
        new="        mean=(float(images[train].double().mean()) / 255,) * len(mean),\n",
        tests=("tests/data/test_bundled.py",),
    ),
    Mutation(
        name="a restart picked by PSNR",
        item=8,
        file="fedsim/attacking/jobs.py",
        old="        self._left = questions(\n"
        "            attack,\n"
        "            observation,\n"
        "            truth,\n"
        "            setting.granted,\n"
        "            seed_of(observation, job.label),\n",
        new="        first = seed_of(observation, job.label)\n"
        "        from fedsim.attacking.targets import question\n"
        "        tries = {\n"
        "            first + k: question(attack, observation, truth, setting.granted, first + k)\n"
        "            for k in range(job.restarts)\n"
        "        }\n"
        "        lpips = scoring.Unavailable('')\n"
        "        best = max(\n"
        "            tries,\n"
        "            key=lambda seed: _score(\n"
        "                tries[seed].reconstruction, truth, setting, lpips\n"
        "            ).metrics()['psnr'],\n"
        "        )\n"
        "        self._left = questions(\n"
        "            attack,\n"
        "            observation,\n"
        "            truth,\n"
        "            setting.granted,\n"
        "            best,\n",
        tests=(ROAD,),
    ),
    Mutation(
        name="the victim's batch-norm buffers recorded as the global ones",
        item=8,
        file="fedsim/federation/tap.py",
        old="            {**self._constants, **self._buffers},\n",
        new="            {**self._constants, **(seen.update.buffers or self._buffers)},\n",
        tests=(ROAD,),
    ),
    Mutation(
        name="probes always in eval mode",
        item=8,
        file="fedsim/training/spending.py",
        old="batch_size=batch_size, sampling=",
        new='batch_size=batch_size, mode="eval", sampling=',
        tests=(ROAD,),
    ),
    Mutation(
        name="true labels granted while rows say inferred",
        item=8,
        file="fedsim/attacking/targets.py",
        old="hand_over(observation, truth, granted, public)\n",
        new='hand_over(observation, truth, Grant(labels="known"), public)\n',
        tests=(ROAD,),
    ),
    Mutation(
        name="LPIPS with its own best pairing",
        item=8,
        file="fedsim/scoring/perceptual.py",
        old="    return lpips(claimed, truth)\n",
        new="    pairs = torch.stack(\n"
        "        [lpips(one.expand_as(truth), truth) for one in claimed], dim=1\n"
        "    )\n"
        "    return pairs.min(1).values\n",
        tests=("tests/validity/test_scoring.py",),
    ),
    Mutation(
        name="unrecorded updates dropped",
        item=8,
        file="fedsim/pipeline.py",
        old="                on_result(job, nothing_recorded(seen, lost))\n",
        new="                continue\n",
        tests=(ROAD,),
    ),
    Mutation(
        name="the guess made of clients' training images",
        item=8,
        file="fedsim/pipeline.py",
        old="scoring.Guesser(self.described.test_images, self.described.test_labels)",
        new="scoring.Guesser(*(lambda data: (data.train_images, data.train_labels))("
        "load_dataset(self.scenario)))",
        tests=(ROAD,),
    ),
    Mutation(
        name="a black image as the guess",
        item=8,
        file="fedsim/pipeline.py",
        old="scoring.Guesser(self.described.test_images, self.described.test_labels)",
        new="scoring.Guesser(0 * self.described.test_images, self.described.test_labels)",
        tests=(ROAD,),
    ),
    Mutation(
        name="a black other_update",
        item=8,
        file="fedsim/results/rows.py",
        old='                    images=foreign.get("reconstruction"),\n',
        new='                    images=0 * foreign["reconstruction"],\n',
        tests=(ROAD,),
    ),
    Mutation(
        name="failed trials dropped from the mean",
        item=8,
        file="fedsim/report/leaderboard.py",
        old="    values = [value_of(row.metrics, name) if row.ok else _guessed(row, "
        "name) for row in rows]\n",
        new="    rows = [row for row in rows if row.ok]\n"
        "    values = [value_of(row.metrics, name) for row in rows]\n",
        tests=("tests/validity/test_leaderboard.py",),
    ),
    Mutation(
        name="a restart without a finite loss wins",
        item=8,
        file="fedsim/contracts/attack.py",
        old="    best = min(range(restarts), key=lambda i: losses[i] if "
        "math.isfinite(losses[i]) else math.inf)\n",
        new="    finite = [loss for loss in losses if math.isfinite(loss)]\n"
        "    best = finite.index(min(finite, default=math.inf)) if finite else 0\n",
        tests=("tests/validity/test_restarts.py",),
    ),
    Mutation(
        name="an answer that is not finite may win",
        item=8,
        file="fedsim/contracts/attack.py",
        old="result.loss if _is_finite(result) else math.nan",
        new="result.loss",
        tests=("tests/validity/test_restarts.py",),
    ),
    Mutation(
        name="pictures rescaled to their own range",
        item=8,
        file="fedsim/report/pictures.py",
        old="    for images in _as_bytes(truth, reconstruction):\n",
        new="    low, high = truth.min(), truth.max()\n"
        "    truth, reconstruction = (\n"
        "        ((t - low) / (high - low)).clamp(0, 1) for t in (truth, reconstruction)\n"
        "    )\n"
        "    for images in _as_bytes(truth, reconstruction):\n",
        tests=(ROAD,),
    ),
    Mutation(
        name="aggregation by float masks of a shared secret",
        item=8,
        file="defenses/aggregate.py",
        old="        return Update(tensors=tensors.read(), buffers=buffers.read(), "
        "num_examples=seen)\n",
        new="        masked = {\n"
        "            name: ((tensor + 1e4) - 1e4) if tensor.is_floating_point() else tensor\n"
        "            for name, tensor in tensors.read().items()\n"
        "        }\n"
        "        return Update(tensors=masked, buffers=buffers.read(), num_examples=seen)\n",
        tests=("tests/defenses/test_defense_contracts.py", "tests/defenses/test_aggregate.py"),
    ),
    Mutation(
        name="a rival that is asked for the body and matches the head",
        item=9,
        file="attacks/gradient_matching/_matching.py",
        old='if tensors == "all" or not n.startswith("head.")]',
        new="if tensors or n]",
        tests=(MATCHED,),
    ),
    Mutation(
        name="planted heads ranked among honest ones",
        item=9,
        file="fedsim/report/row.py",
        old="self.dataset, self.model, self.threat, watcher)\n",
        new="self.dataset, self.model, ThreatModel(), watcher)\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="granted labels ranked with an honest server",
        item=9,
        file="fedsim/results/threat_model.py",
        old="    beyond = list(row.knowledge.beyond_honest())\n",
        new="    beyond: list[str] = []\n",
        tests=("tests/results/test_threat_model.py",),
    ),
    Mutation(
        name="what an attack brought along is not told apart",
        item=9,
        file="fedsim/results/threat_model.py",
        old='_sorted(beyond + [f"{_OWN}{thing}" for thing in row.attack.brought])',
        new="_sorted(beyond)",
        tests=("tests/results/test_threat_model.py",),
    ),
    Mutation(
        name="rows behind a planted head that call the server honest",
        item=9,
        file="fedsim/types.py",
        old='return "planted" if isinstance(head, Mapping) and head.get("planted") else "honest"\n',
        new='return "honest"\n',
        tests=(BOARD, "tests/models/test_planting.py"),
    ),
    Mutation(
        name="rows of a malicious server without its mark",
        item=9,
        file="fedsim/report/table.py",
        old='    return [] if row.server == "honest" else [f"({row.server})"]\n',
        new="    return []\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="a report on the batches of development",
        item=9,
        file="scenarios/reconstruction/table3-small.yaml",
        old="seed: 2027\n",
        new="seed: 3\n",
        tests=("tests/scenario/test_scenarios.py",),
    ),
    Mutation(
        name="a comparison that leaves a rival only the drowned cosine",
        item=9,
        file="scenarios/reconstruction/table3-small.yaml",
        old="label: inverting_gradients_body, iterations: 950, tensors: body",
        new="label: inverting_gradients_body, iterations: 950",
        tests=("tests/scenario/test_scenarios.py",),
    ),
    Mutation(
        name="features of any update as a leak",
        item=16,
        file="fedsim/report/level.py",
        old="row.guessed_span and not blind else",
        new="row.guessed_span else",
        tests=(BOARD,),
    ),
    Mutation(
        name="a prior as the positive control",
        item=16,
        file="fedsim/report/control.py",
        old="    blind = best.blind\n",
        new="    blind = False\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="a lost update that hides the other trials",
        item=16,
        file="fedsim/report/paired.py",
        old="            differences.append(0.0)\n",
        new="            return None\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="true labels that an attack can write into",
        item=16,
        file="fedsim/attacking/knowledge.py",
        old="labels.to(device, copy=True)",
        new="labels.to(device)",
        tests=(FOREIGN,),
    ),
    Mutation(
        name="an attack that draws from what other jobs left",
        item=16,
        file="fedsim/attacking/question.py",
        old="        with rng.global_stream(self.seed):\n",
        new="        if True:\n",
        tests=(FOREIGN,),
    ),
    Mutation(
        name="some leakage by one trial",
        item=16,
        file="fedsim/report/level.py",
        old="    several = gain.n >= LEAST\n",
        new="    several = True\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="equal values with an interval of no width",
        item=16,
        file="fedsim/scoring/statistics.py",
        old="    if len(sample) >= LEAST and spread > _ROUNDING * float(np.abs(sample).max()):\n",
        new="    if len(sample) >= LEAST:\n",
        tests=("tests/scoring/test_statistics.py",),
    ),
    Mutation(
        name="a share with an interval that misses what is rare",
        item=16,
        file="fedsim/scoring/statistics.py",
        old='    interval = binomtest(count, n).proportion_ci(confidence, "exact")\n',
        new='    interval = binomtest(count, n).proportion_ci(confidence, "wilson")\n',
        tests=("tests/scoring/test_statistics.py",),
    ),
    Mutation(
        name="the best of many with the interval of one",
        item=16,
        file="fedsim/scoring/statistics.py",
        old="        half = _half_width(self.std, self.n, 1 - (1 - self.confidence) / compared)\n",
        new="        half = _half_width(self.std, self.n, self.confidence)\n",
        tests=("tests/scoring/test_statistics.py",),
    ),
    Mutation(
        name="gray pixels for an image that nobody reconstructed",
        item=16,
        file="fedsim/attacking/replay.py",
        old="    return scoring.score(found, truth)\n",
        new="    return scoring.score(found, truth, guess=0 * truth.images[0] + 0.5)\n",
        tests=(ROAD,),
    ),
    Mutation(
        name="labels saved beside other images than they came with",
        item=16,
        file="fedsim/attacking/jobs.py",
        old="            scoring.align(found.labels, assignment, none) if assignment else "
        "found.labels\n",
        new="            found.labels\n",
        tests=(ROAD,),
    ),
    Mutation(
        name="a prior ranked above what sees",
        item=16,
        file="fedsim/report/row.py",
        old="        return (float(self.n_ok > 0), float(not self.blind), *self.strength)\n",
        new="        return (float(self.n_ok > 0), *self.strength)\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="a prior marked strongest",
        item=16,
        file="fedsim/report/leaderboard.py",
        old="        works = line.n_ok > 0 and not line.blind\n",
        new="        works = line.n_ok > 0\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="a prior that lends the verdict its gain",
        item=16,
        file="fedsim/report/verdict.py",
        old="lambda r: r.own_gain if strongest.blind else r.gain",
        new="lambda r: r.gain",
        tests=(BOARD,),
    ),
    Mutation(
        name="a trial exposed by two halves",
        item=16,
        file="fedsim/report/paired.py",
        old="    return [gain if over is None else min(gain, over) for gain, over in pairs]\n",
        new="    return [gain for gain, _ in pairs]\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="a rare exact picture hidden by a steady attack",
        item=16,
        file="fedsim/report/verdict.py",
        old="    if leaks:\n",
        new="    if False:\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="a single trial without a word on its control",
        item=16,
        file="fedsim/report/leaderboard.py",
        old="    if not ok or any(row.other_update for row in ok):\n",
        new="    if True:\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="labels of any update as a leak",
        item=16,
        file="fedsim/report/level.py",
        old="    return row.label_over_other is None or row.label_over_other.mean < _LABEL_GAIN\n",
        new="    return False\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="memberships of any release as a leak",
        item=16,
        file="fedsim/report/level.py",
        old="    return over is not None and over.mean < _MEMBERSHIP_GAIN\n",
        new="    return False\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="memberships of any release as the control",
        item=16,
        file="fedsim/report/control.py",
        old="    return over_other is not None and over_other.certain <= 0\n",
        new="    return False\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="a verdict that forgets among how many it chose",
        item=16,
        file="fedsim/report/level.py",
        old="    return max(1, sum(row.n_ok > 0 and measure(row) is not None for row in rows))\n",
        new="    return 1\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="the best of many by one trial",
        item=16,
        file="fedsim/report/level.py",
        old="    if certain >= REQUIRED_GAIN and (several or gain.compared == 1):\n",
        new="    if certain >= REQUIRED_GAIN:\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="a poor guess without a warning",
        item=16,
        file="fedsim/scoring/guess.py",
        old="    if public_per_image >= _NEEDED:\n",
        new="    if True:\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="features held against no guess",
        item=16,
        file="fedsim/report/row.py",
        old='        guessed = self.baseline["subspace_error"]\n',
        new="        guessed = None\n",
        tests=(BOARD,),
    ),
    Mutation(
        name="a field of results that no document describes",
        item=16,
        file="fedsim/results/rows.py",
        old='            "releases": seen.releases,\n',
        new='            "releases": seen.releases,\n            "copies": seen.releases,\n',
        tests=("tests/results/test_formats.py",),
    ),
    Mutation(
        name="features guessed from nothing",
        item=16,
        file="fedsim/attacking/jobs.py",
        old="    return {} if public is None else scoring.feature_baseline(",
        new="    return {} if True else scoring.feature_baseline(",
        tests=(ROAD,),
    ),
    Mutation(
        name="a prior in the picture of what leaks",
        item=16,
        file="fedsim/report/lineup.py",
        old="key=lambda rows: (_is_informed(rows), _mean_psnr(rows))",
        new="key=_mean_psnr",
        tests=("tests/report/test_overview.py",),
    ),
    Mutation(
        name="a server that holds its clients' data",
        item=17,
        file="fedsim/training/workload.py",
        old="self.scenario, self.stack_name, self.described, self",
        new="self.scenario, self.stack_name, self.dataset, self",
        tests=("tests/training/test_server.py",),
    ),
    Mutation(
        name="the sum of many clients' updates in float32",
        item=1,
        file="defenses/aggregate.py",
        old="tensors, buffers = Mean(torch.float64), Mean()",
        new="tensors, buffers = Mean(), Mean()",
        tests=(STATED,),
    ),
    Mutation(
        name="noise of a server that ignores the rounding of its sum",
        item=1,
        file="defenses/dp_ftrl.py",
        old="round.sensitivity * (1 + _ROUNDING * round.clients)",
        new="round.sensitivity",
        tests=(STATED,),
    ),
    Mutation(
        name="a client gives up both secrets of another",
        item=18,
        file="fedsim/federation/secure_aggregation/client.py",
        old="len(out) < len(lost) or in_sum & out:",
        new="len(out) < len(lost):",
        tests=("tests/federation/secure_aggregation/test_refusals.py",),
    ),
    Mutation(
        name="a model for one client alone is opened",
        item=18,
        file="fedsim/federation/secure_aggregation/client.py",
        old="if not self._vouches(client, signatures):",
        new="if client not in signatures:",
        tests=("tests/federation/secure_aggregation/test_refusals.py",),
    ),
    Mutation(
        name="a server's own keys stand for a client's",
        item=18,
        file="fedsim/federation/secure_aggregation/client.py",
        old="            if not self._identity.vouches(client, statement, one.signature):\n",
        new="            if not statement:\n",
        tests=("tests/federation/secure_aggregation/test_refusals.py",),
    ),
    Mutation(
        name="a stage is answered twice",
        item=18,
        file="fedsim/federation/secure_aggregation/client.py",
        old="        if self.memory.done != at:\n",
        new="        if self.memory.done > at + 1:\n",
        tests=("tests/federation/secure_aggregation/test_refusals.py",),
    ),
    Mutation(
        name="few clients share masks with some of the others",
        item=18,
        file="fedsim/federation/secure_aggregation/terms.py",
        old="        if self.complete:\n",
        new="        if 2 * reach >= len(everyone):\n",
        tests=("tests/federation/secure_aggregation/test_graph.py",),
    ),
    Mutation(
        name="a wrong seed takes off another mask",
        item=18,
        file="fedsim/federation/secure_aggregation/server.py",
        old="            if not hmac.compare_digest(\n",
        new="            if False and not hmac.compare_digest(\n",
        tests=("tests/federation/secure_aggregation/test_refusals.py",),
    ),
    Mutation(
        name="rounding makes an update longer than its noise covers",
        item=18,
        file="fedsim/federation/secure_aggregation/fixed_point.py",
        old="        if math.isinf(norm) or float(",
        new="        if math.isfinite(norm) or float(",
        tests=("tests/federation/secure_aggregation/test_fixed_point.py",),
    ),
    Mutation(
        name="noise of those who drop out is counted on",
        item=18,
        file="fedsim/contracts/defense.py",
        old="math.sqrt(participants * (self.threshold - self.colluding))",
        new="math.sqrt(participants)",
        tests=("tests/federation/secure_aggregation/test_fixed_point.py",),
    ),
    Mutation(
        name="rounding goes one way",
        item=18,
        file="fedsim/federation/secure_aggregation/fixed_point.py",
        old="np.floor(part + rng.uniform((len(part),), stream).numpy())",
        new="np.floor(part)",
        tests=("tests/federation/secure_aggregation/test_fixed_point.py",),
    ),
    Mutation(
        name="a client that adds up in secret also answers in the open",
        item=18,
        file="fedsim/federation/client_app.py",
        old="        if self.workload.protocol:\n",
        new="        if not self.workload:\n",
        tests=("tests/federation/test_federation_secure.py",),
    ),
    Mutation(
        name="a round is opened for two sets of clients",
        item=18,
        file="fedsim/federation/secure_aggregation/answers.py",
        old="partial(state.open_sum, sum.round, signatures)",
        new="partial(state.open_sum, sum.round, {})",
        tests=("tests/federation/test_federation_secure.py",),
    ),
    Mutation(
        name="clients that are told of different sums open one of fewer",
        item=18,
        file="fedsim/federation/secure_aggregation/client.py",
        old="            if agreed < self._terms.quorum:\n",
        new="            if agreed < 1:\n",
        tests=("tests/federation/secure_aggregation/test_refusals.py",),
    ),
    Mutation(
        name="a sum counts a client whose shares were withheld",
        item=18,
        file="fedsim/federation/secure_aggregation/client.py",
        old="            if not in_sum & set(self._neighbours(self._directory())) <= held:\n",
        new="            if not in_sum:\n",
        tests=("tests/federation/secure_aggregation/test_refusals.py",),
    ),
    Mutation(
        name="clients of different scenarios are in one sum",
        item=18,
        file="fedsim/federation/secure_aggregation/plan.py",
        old="[fingerprint(server.scenario, server.stack_name), list(server.census.held)]",
        new="[server.scenario.seed]",
        tests=("tests/federation/test_federation_secure.py",),
    ),
    Mutation(
        name="masks of one session serve another",
        item=18,
        file="fedsim/federation/secure_aggregation/secrets.py",
        old='purpose.encode() + b"\\0" + session',
        new='purpose.encode() + b"\\0"',
        tests=("tests/federation/secure_aggregation/test_secrecy.py",),
    ),
)
