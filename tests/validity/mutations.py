"""Faults that made leakage numbers wrong, as changes of the syntax that put each one back.

A fault counts as met only if the fast suite fails with it: `test_mutations.py` applies each to a
copy of the project and runs the tests that are named. See `mutate.py` for what a piece of syntax
matches.
"""

from __future__ import annotations

from dataclasses import replace

from mutate import Mutation, drop, never, swap

ASSUMPTIONS = "tests/validity/test_assumptions.py"
BAD_INPUT = "tests/test_bad_input.py"
BESIDE = "tests/validity/test_beside_leakage.py"
BOARD = "tests/validity/test_leaderboard.py"
CERTIFICATES = "tests/validity/test_false_certificates.py"
CERTIFIED_IMAGES = "tests/attacks/classifier_features/test_certified_images.py"
CLAIMS = "tests/validity/test_claims.py"
EFFECTS = "tests/validity/test_effects.py"
EXTREMES = "tests/privacy/test_extremes.py"
FIXED_POINT = "tests/federation/secure_aggregation/test_fixed_point.py"
FOREIGN = "tests/validity/test_foreign_attacks.py"
GUESS = "tests/scoring/test_guess.py"
HOLDERS = "tests/validity/test_who_holds_the_noise.py"
IDENTITY = "tests/results/test_identity.py"
LIMITS = "tests/report/test_limits.py"
LOW_BITS = "tests/defenses/test_low_bits.py"
ONE_ANSWER = "tests/federation/network/test_one_answer.py"
PATHS = "tests/system/test_paths.py"
PUBLIC_KEYS = "tests/federation/secure_aggregation/test_public_keys.py"
REFUSALS = "tests/federation/secure_aggregation/test_refusals.py"
ROAD = "tests/validity/test_road.py"
SECURE = "tests/federation/test_federation_secure.py"
SEEDS = "tests/validity/test_seeds.py"
SENSITIVITY = "tests/validity/test_sensitivity.py"
STATED = "tests/validity/test_stated_epsilon.py"
STATISTICS = "tests/scoring/test_statistics.py"
THREADS = "tests/validity/test_threads.py"
THREATS = "tests/results/test_threat_model.py"
VICTIMS = "tests/validity/test_victims.py"

_BY_SECTION: dict[int, dict[str, Mutation]] = {
    # Ε holds although mean and std come from private images.
    1: {
        "a learner that steps around the stack": swap(
            "fedsim/federation/refusals.py:a_client_can_train",
            "not stack.directed",
            "False",
            STATED,
        ),
        "a clipped gradient above its bound by rounding": swap(
            "defenses/per_example.py:_clipped_sum", "norm * slack", "norm", STATED
        ),
        "a mean of very many examples in float32": drop(
            "defenses/per_example.py:clipped_mean", "dtype=torch.float64", STATED
        ),
        "a claim beside tensors that no defense acts on": swap(
            "fedsim/privacy/ledger.py:_not_covered", "bool(entry.unprotected)", "False", STATED
        ),
        "images in the order of their classes": swap(
            "fedsim/data/folder.py:_in_order",
            "(item.client, item.name, item.class_name)",
            "(item.class_name, item.client, item.name)",
            SENSITIVITY,
        ),
        "a claim where labels decide on places": swap(
            "fedsim/training/source.py:private_statistics",
            "partition in _BY_PLACE",
            "not partition",
            SENSITIVITY,
        ),
        "a claim behind a limit by classes": swap(
            "fedsim/data/folder.py:ImageFolder.load", "(_LIMIT,) if cut else ()", "()", SENSITIVITY
        ),
        "clients' images normalize clients' images": never(
            "fedsim/data/folder.py:ImageFolder._normalize",
            "self.normalization == 'declared'",
            SENSITIVITY,
        ),
        "private statistics void nothing": swap(
            "fedsim/privacy/ledger.py:_not_covered",
            "entry.private_statistics.get(mechanism.unit, ())",
            "()",
            SENSITIVITY,
        ),
        "a source that does not say is believed": drop(
            "fedsim/training/source.py:private_statistics",
            "f'data source {dataset.name} does not declare {kind}.private_statistics'",
            SENSITIVITY,
        ),
        "weights of unknown origin are believed": swap(
            "fedsim/training/source.py:private_statistics",
            "found += (_WEIGHTS,)",
            "pass",
            SENSITIVITY,
        ),
        "an audit's worlds share their statistics": swap(
            "fedsim/training/workload.py:Workload.of_neighbours",
            "build_source(self.scenario.data.source).prepared(dataset)",
            "dataset",
            SENSITIVITY,
        ),
        "digits normalized by their own mean": swap(
            "fedsim/data/bundled.py:_dataset",
            "mean",
            "(float(images[train].double().mean()) / 255,) * len(mean)",
            "tests/data/test_bundled.py",
        ),
        "the sum of many clients' updates in float32": drop(
            "defenses/aggregate.py:sum_updates", "torch.float64", STATED
        ),
        "noise of a server that ignores the rounding of its sum": swap(
            "defenses/dp_ftrl.py:DPFTRL.add_noise",
            "round.sensitivity * (1 + _ROUNDING * round.clients)",
            "round.sensitivity",
            STATED,
        ),
        "an epsilon refuted by less than a factor of two holds": swap(
            "fedsim/audit/mechanisms.py:MechanismVerdict.holds",
            "self.claim",
            "2 * self.claim",
            BESIDE,
        ),
        "all trials of a size have one noise": drop(
            "fedsim/training/client.py:Client._path", "probe.trial", BESIDE
        ),
        "the strongest claim stands for all rows": swap(
            "fedsim/report/leaderboard.py:_pooled_claim",
            "max(stated, key=lambda claim: float(claim.epsilon or 0.0))",
            "min(stated, key=lambda claim: float(claim.epsilon or 0.0))",
            BESIDE,
        ),
        "the least delta stands for all rows": swap(
            "fedsim/report/leaderboard.py:_pooled_claim", "max(deltas)", "min(deltas)", BESIDE
        ),
        "the least bound of an audit stands for all": swap(
            "fedsim/report/leaderboard.py:_claimed",
            "max((each for each in audited if each is not None), default=None)",
            "min((each for each in audited if each is not None), default=None)",
            BESIDE,
        ),
        "a limit of membership where presence is not claimed": swap(
            "fedsim/results/rows.py:_membership_limits",
            "guarantee.relation != 'add_or_remove'",
            "guarantee.relation is None",
            BESIDE,
        ),
        "a participant that forgets its own noise": swap(
            "fedsim/training/accounting.py:accounted_stack",
            "seen_from == 'client'",
            "seen_from == 'nobody'",
            HOLDERS,
        ),
        "shared noise of clients that collude": swap(
            "defenses/secure_aggregation.py:SecureAggregation.guarantee",
            "before.pooled.with_share(1 - self.colluding)",
            "before.pooled",
            HOLDERS,
        ),
        "an ideal that a deployment's server computes itself": swap(
            "fedsim/training/accounting.py:accounted_stack",
            "build_engine(server.scenario.federation.engine).remote",
            "False",
            HOLDERS,
        ),
        "a limit of ε kept by what is no differential privacy": swap(
            "fedsim/report/limits.py:_why_not_kept",
            "claim.relation in NO_DIFFERENTIAL_PRIVACY",
            "claim.relation in ()",
            LIMITS,
        ),
        "a limit of ε kept by what an attack refutes": swap(
            "fedsim/report/limits.py:_refuted_by_attack",
            "least > most",
            "least > 1",
            LIMITS,
        ),
        "a share of members that refutes no ε": swap(
            "fedsim/report/row.py:is_refuted_by_members",
            "self.membership_p <= REFUTING_LEVEL",
            "False",
            LIMITS,
        ),
        "a client that refutes an ε, averaged away": swap(
            "fedsim/report/leaderboard.py:_corrected_p",
            "min(found)",
            "sum(found) / len(found)",
            LIMITS,
        ),
        "a claim that many attempts refute by chance": swap(
            "fedsim/report/leaderboard.py:_corrected_p",
            "attempts * min(found)",
            "min(found)",
            LIMITS,
        ),
        "a client that keeps an ε between its going and coming": swap(
            "fedsim/privacy/membership.py:row_claim",
            "2 * epsilon",
            "epsilon",
            "tests/privacy/test_update_membership_limits.py",
        ),
        "members that δ shows together, each counted for itself": swap(
            "fedsim/privacy/membership.py:share_p_value",
            "2 * (members + others) * delta / (i + 1)",
            "0.0",
            "tests/privacy/test_update_membership_limits.py",
        ),
        "the span of several answers with the limit of one": swap(
            "fedsim/privacy/recovery.py:direction_chances",
            "betainc((dimension - answers) / 2, answers / 2, squares)",
            "answers * betainc((dimension - 1) / 2, 0.5, squares)",
            "tests/privacy/test_recovery_limits.py",
        ),
        "noise whose low bits are shown": swap(
            "fedsim/contracts/defense.py:_rounded_to", "2.0 ** 52", "0", LOW_BITS
        ),
        "a sum of half precision that overflows": swap(
            "defenses/aggregate.py:RunningMean.read",
            "torch.promote_types(kept, torch.float32)",
            "kept",
            LOW_BITS,
        ),
        "one look at noise that spares a tensor": swap(
            "fedsim/audit/two_worlds.py:choose_look",
            "best if told[best] > _GAIN * told[0] else 0",
            "0",
            "tests/audit/test_noise_structure.py",
        ),
        "no Rényi divergence below the rounding of losses": drop(
            "fedsim/privacy/composition/poisson.py:least_bound",
            "bounds.append((_renyi(noise, epsilon, steps, sampling_rate), RENYI))",
            "tests/privacy/composition/test_poisson.py",
        ),
        "the paper's Gaussian step beyond ε = 1": swap(
            "fedsim/privacy/baselines.py:kan_epsilon",
            "max(_classical(delta) * reach / noise, exact)",
            "_classical(delta) * reach / noise",
            "tests/privacy/baselines/test_kan_paper.py",
        ),
        "a release of nothing that is composed": swap(
            "fedsim/privacy/composition/curves.py:epsilon",
            "_at(curve, 0.0) > -math.inf",
            "curve",
            "tests/privacy/test_asked_epsilon.py",
        ),
        "a file's split that follows from its length": drop(
            "fedsim/data/table.py:TableFile.load", "split_by_row=True", "tests/data/test_tables.py"
        ),
    },
    # A probe costs what the row's training costs.
    2: {
        "a probe carries the training's batch size": swap(
            "fedsim/training/accounting.py:claim_of",
            "server.declared_of(seen.training.batch_size)",
            "server.declared",
            CLAIMS,
        ),
        "probes are left out of the run's claim": drop(
            "fedsim/training/spending.py:Account.entries",
            "probes=self.list_probed(most.probed) if probes else ()",
            CLAIMS,
        ),
    },
    # Ε without unit, neighbours and δ is a claim.
    3: {
        "an epsilon rounded down where it is written": swap(
            "fedsim/words.py:format_epsilon",
            "_round_to(epsilon, 3, ROUND_CEILING)",
            "_round_to(epsilon, 3, ROUND_HALF_EVEN)",
            STATED,
        ),
        "assumptions that the data contradict are believed": drop(
            "fedsim/federation/refusals.py:data_keep_to_the_claim",
            "workload.check_assumptions()",
            ASSUMPTIONS,
        ),
        "rows longer than their bound": swap(
            "fedsim/types.py:Table.__post_init__",
            "~(norms <= self.row_norm * (1 + _ROUNDING))",
            "norms < 0",
            ASSUMPTIONS,
        ),
        "an epsilon without its unit, relation and delta": swap(
            "fedsim/words.py:format_claim",
            "f\"{format_epsilon(epsilon)} ({', '.join(words)})\"",
            "format_epsilon(epsilon)",
            CLAIMS,
        ),
    },
    # A recording says nothing of the noise in it.
    4: {
        "noise of the server used again for another sum": swap(
            "fedsim/federation/tap.py:TapGrid._combine",
            "use_once(path, release_key(self._round, probe), [combined.tensors], 'the server')",
            "pass",
            "tests/federation/test_federation_tap.py",
        ),
        "noise used again at other weights": never(
            "fedsim/federation/noise_use.py:use_once",
            "before and at not in before",
            "tests/federation/test_federation_client.py",
        ),
        "rounds in descending order are answered": swap(
            "fedsim/federation/noise_use.py:refuse_past",
            "own[0] < last and (not is_released)",
            "own[0] < 0",
            ONE_ANSWER,
        ),
        "an answer is repeated with other bytes": swap(
            "fedsim/federation/noise_use.py:note_release",
            "entry.setdefault('release', at) != at",
            "entry.setdefault('release', at) is None",
            ONE_ANSWER,
        ),
        "a greeting makes a node forget its steps": swap(
            "fedsim/federation/client_state.py:ClientState.rewind",
            "max([done, *noted_rounds(self._notes)])",
            "done",
            ONE_ANSWER,
        ),
        "a run of another census": swap(
            "fedsim/federation/network/home.py:pin_run",
            "(held, 'a run of clients with other numbers of examples')",
            "('', 'a run of clients with other numbers of examples')",
            ONE_ANSWER,
        ),
        "noise of a server's words": swap(
            "fedsim/federation/network/node_app.py:NodeApp._build",
            "['noise', stack, *pins]",
            "['noise', stack, *pins, held]",
            ONE_ANSWER,
        ),
        "noise in the server's order of tensors": swap(
            "fedsim/federation/wire.py:read_order",
            "decode_like(parameters, form[0]) if form else decode(parameters)",
            "decode(parameters)",
            ONE_ANSWER,
        ),
        "what fedsim validate refuses is answered": swap(
            "fedsim/federation/network/node_app.py:NodeApp._check",
            "resolve(scenario.model_copy(update=own))",
            "scenario.model_copy(update=own)",
            ONE_ANSWER,
        ),
        "one noise at two δ": swap(
            "fedsim/federation/checkpoint.py:fingerprint",
            "scenario.privacy != Privacy()",
            "scenario.privacy is None",
            "tests/training/test_fingerprint.py",
        ),
        "two spellings of a key have one mask": swap(
            "fedsim/federation/secure_aggregation/secrets.py:agree_key",
            "list_entries(keys)",
            "b''",
            PUBLIC_KEYS,
        ),
        "keys that are not canonical": drop(
            "fedsim/federation/secure_aggregation/secrets.py:check_public",
            "number >= _PRIME",
            PUBLIC_KEYS,
        ),
        "a sketch drawn from 32 bits": swap(
            "fedsim/learners/closed_form.py:ClosedForm.compute",
            "request.stream",
            "torch.Generator().manual_seed(request.stream.initial_seed())",
            STATED,
        ),
        "the scenario's seed in every observation": swap(
            "fedsim/training/server.py:Server.observation",
            "self.scenario.attack_seed",
            "self.scenario.seed",
            SEEDS,
        ),
        "streams of 32 bits": swap(
            "fedsim/rng.py:Stream.__init__",
            "self.set_state(_mersenne_state(material))",
            "self.manual_seed(int.from_bytes(hashlib.sha256(material).digest()[:4]))",
            SEEDS,
        ),
        "noise from the generator of simulations": swap(
            "fedsim/contracts/defense.py:standard_normal",
            "normal(tensor.shape, rng, torch.float64).to(tensor.device)",
            "torch.randn(tensor.shape, generator=rng, dtype=torch.float64)",
            SEEDS,
        ),
        "pairs of least distance in place of least squared error": swap(
            "fedsim/contracts/metric.py:match", "distance.square()", "distance", BESIDE
        ),
    },
    # Results are the same on another processor.
    5: {
        "a neuron at the kink is decided by rounding": swap(
            "attacks/head_features/activation_features.py:Peeling._single_images",
            "-slack",
            "0",
            "tests/attacks/head_features/test_feature_attacks.py",
        ),
    },
    # Attacks know a defense by its name.
    6: {
        "an own attack blind to noise": swap(
            "attacks/head_features/_head_gradient.py:HeadGradient.read",
            "effect.noisy",
            "False",
            EFFECTS,
        ),
        "an own attack blind to pruning": swap(
            "attacks/head_features/_head_gradient.py:HeadGradient.read",
            "effect.removed is not None",
            "False",
            EFFECTS,
        ),
        "bounds of removed entries ignored": swap(
            "attacks/images_from_features/_body_gradient.py:_bounds",
            "removed is None or observation.effect.noisy",
            "removed",
            EFFECTS,
        ),
        "a stack that drops what a second defense does": swap(
            "fedsim/types.py:Effect.then",
            "self.noise + after.noise",
            "self.noise or after.noise",
            EFFECTS,
        ),
        "a foreign defense is taken for none": drop("fedsim/types.py", "known=False", EFFECTS),
    },
    # Bootstrap intervals of few trials cover 95%.
    7: {
        "one image guessed for all of a batch": swap(
            "fedsim/scoring/guess.py:Guesser._learn",
            "everything.guess(chosen, count)",
            "everything.guess('mean_image', count)",
            GUESS,
            VICTIMS,
        ),
        "the guess ignores granted labels": swap(
            "fedsim/targets/images.py:guessed_batch",
            "truth['labels'].tolist() if request.granted.labels == 'known' else None",
            "None",
            VICTIMS,
        ),
        "what is filled in comes of the truth": swap(
            "fedsim/targets/images.py:Images.compare",
            "align(answer, assignment, aid.fill)",
            "align(answer, assignment, true.mean(0))",
            VICTIMS,
        ),
        "few public images are learned by heart": swap(
            "fedsim/scoring/guess_pool.py:Pool.families",
            "[*plain, learned] if count <= _MAX_LEARNED else plain",
            "[learned]",
            GUESS,
        ),
        "labels alone are guessed by the majority": swap(
            "fedsim/scoring/guess.py:Guesser._learn",
            "_likeliest(self._labels, count) if granted is None else torch.tensor(granted)",
            "self._labels.bincount().argmax().repeat(count)",
            GUESS,
        ),
        "a control without the attack's stretching": swap(
            "attacks/gradient_matching/prior_only.py:PriorOnly.postprocess",
            "expose(state.best, state.drawing.box) if self.stretched else state.best",
            "state.best",
            "tests/attacks/gradient_matching/test_prior_only.py",
        ),
        "an interval of 90% that is labelled 95%": swap(
            "fedsim/scoring/statistics.py:_quantile",
            "(1 + confidence) / 2",
            "0.95 if confidence == 0.95 else (1 + confidence) / 2",
            STATISTICS,
        ),
        "intervals of two values": swap(
            "fedsim/scoring/statistics.py", "LEAST = 3", "LEAST = 2", STATISTICS
        ),
    },
    # The honesty tests find faults.
    8: {
        "a restart picked by PSNR": swap(
            "fedsim/attacking/running.py:_AskedJob.__init__",
            "self._left = questions(...)",
            "first = seed_of(observation, job.label)\nfrom fedsim.attacking.targets "
            "import question\nfrom fedsim import scoring\n"
            "tries = {first + k: question(attack, observation, truth, "
            "setting.granted, first + k) for k in range(job.restarts)}\nbest = "
            "max(tries, key=lambda seed: "
            "scoring.score(tries[seed].reconstruction, truth)['psnr'])\nself._left = "
            "questions(attack, observation, truth, setting.granted, best, public=public, "
            "restarts=1)",
            ROAD,
        ),
        "the victim's batch-norm buffers recorded as the global ones": swap(
            "fedsim/federation/tap.py:TapGrid._save",
            "self._buffers",
            "seen.update.buffers or self._buffers",
            ROAD,
        ),
        "probes always in eval mode": swap(
            "fedsim/training/spending.py:as_probed",
            "replace(declared, batch_size=batch_size, sampling='without_replacement')",
            "replace(declared, batch_size=batch_size, sampling='without_replacement', mode='eval')",
            ROAD,
        ),
        "true labels granted while rows say inferred": swap(
            "fedsim/attacking/targets.py:questions",
            "hand_over(observation, truth, granted, public)",
            "hand_over(observation, truth, Grant(labels='known'), public)",
            ROAD,
        ),
        "LPIPS with its own best pairing": swap(
            "fedsim/scoring/perceptual.py:perceptual_distance",
            "lpips(claimed, truth)",
            "torch.stack([lpips(one.expand_as(truth), truth) for one in claimed], "
            "dim=1).min(1).values",
            "tests/validity/test_scoring.py",
        ),
        "unrecorded updates dropped": swap(
            "fedsim/pipeline.py:_Execution._attack",
            "on_result(job, self._without_recording(seen))",
            "continue",
            ROAD,
        ),
        "the guess made of clients' training images": swap(
            "fedsim/pipeline.py:_Execution._setting",
            "guess(self.described.test_images, self.described.test_labels)",
            "guess(*(lambda data: (data.train_images, "
            "data.train_labels))(load_dataset(self.scenario)))",
            ROAD,
        ),
        "a black image as the guess": swap(
            "fedsim/pipeline.py:_Execution._setting",
            "self.described.test_images",
            "0 * self.described.test_images",
            ROAD,
        ),
        "a black other_update": swap(
            "fedsim/scoring/score.py:score_other",
            "score(made.with_parts(answers), truth)",
            "score(made.with_parts({**answers, 'images': 0 * answers['images']}), truth)",
            ROAD,
        ),
        "failed trials dropped from the mean": swap(
            "fedsim/report/leaderboard.py:_count_failures",
            "values = ...",
            "rows = [row for row in rows if row.ok]\nvalues = [value_of(row.metrics, "
            "name) for row in rows]",
            BOARD,
        ),
        "a restart without a finite loss wins": swap(
            "fedsim/contracts/attack.py:solve",
            "best = min(...)",
            "finite = [loss for loss in losses if math.isfinite(loss)]\nbest = "
            "finite.index(min(finite, default=math.inf)) if finite else 0",
            "tests/validity/test_restarts.py",
        ),
        "an answer that is not finite may win": swap(
            "fedsim/contracts/attack.py:solve",
            "result.loss if _is_finite(result) else math.nan",
            "result.loss",
            "tests/validity/test_restarts.py",
        ),
        "pictures rescaled to their own range": swap(
            "fedsim/report/pictures.py:save_grid",
            "_as_bytes(truth, reconstruction)",
            "_as_bytes(*(((t - truth.min()) / (truth.max() - truth.min())).clamp(0, 1) "
            "for t in (truth, reconstruction)))",
            ROAD,
        ),
        "aggregation by float masks of a shared secret": swap(
            "defenses/aggregate.py:Aggregate.combine",
            "tensors.read()",
            "{name: tensor + 1e4 - 1e4 if tensor.is_floating_point() else tensor for "
            "name, tensor in tensors.read().items()}",
            "tests/defenses/test_defense_contracts.py",
            "tests/defenses/test_aggregate.py",
        ),
    },
    # Rivals behind a planted head are compared fairly.
    9: {
        "a run's rows are dropped for those of another of its name": swap(
            "fedsim/results/reading.py:measurements", "row.content", "row.place", IDENTITY
        ),
        "runs of one name with other figures are pooled": swap(
            "fedsim/results/reading.py:_contradictions",
            "stated.setdefault(place, content) != content",
            "stated.setdefault(place, content) is None",
            IDENTITY,
        ),
        "runs of one text and of other data are pooled": swap(
            "fedsim/results/reading.py:_origins",
            "len({run.origin for run in runs if run.origin}) < 2",
            "len({run.origin for run in runs if run.origin}) < 99",
            IDENTITY,
        ),
        "a rival that is asked for the body and matches the head": swap(
            "attacks/gradient_matching/_matching.py:Matching.__init__",
            "tensors == 'all' or not n.startswith('head.')",
            "tensors or n",
            "tests/attacks/gradient_matching/test_matched_tensors.py",
        ),
        "planted heads ranked among honest ones": swap(
            "fedsim/report/row.py:LeaderboardRow.comparison", "self.threat", "ThreatModel()", BOARD
        ),
        "granted labels ranked with an honest server": swap(
            "fedsim/report/threat.py:threat_model_of",
            "beyond = list(row.knowledge.beyond_honest())",
            "beyond: list[str] = []",
            THREATS,
        ),
        "what an attack brought along is not told apart": swap(
            "fedsim/report/threat.py:threat_model_of",
            "beyond + [f'{_OWN}{thing}' for thing in row.attack.brought]",
            "beyond",
            THREATS,
        ),
        "rows behind a planted head that call the server honest": swap(
            "fedsim/types.py:server_of",
            "'planted' if isinstance(head, Mapping) and head.get('planted') else 'honest'",
            "'honest'",
            BOARD,
            "tests/models/test_planting.py",
        ),
        "rows of a malicious server without its mark": swap(
            "fedsim/report/render.py:_grid",
            "[] if row.server == 'honest' else [f'({row.server})']",
            "[]",
            BOARD,
        ),
        "a report on the batches of development": swap(
            "scenarios/reconstruction/table3-small.yaml",
            "seed: 2027",
            "seed: 3",
            "tests/scenario/test_scenarios.py",
        ),
        "a comparison that leaves a rival only the drowned cosine": swap(
            "scenarios/reconstruction/table3-small.yaml",
            "label: inverting_gradients_body, iterations: 950, tensors: body",
            "label: inverting_gradients_body, iterations: 950",
            "tests/scenario/test_scenarios.py",
        ),
        "compare passes what grows within a wide interval": swap(
            "fedsim/report/limits.py:_more",
            "is_ > _upper(old) + _UNSEEN or is_ - was >= new.main.leaks",
            "is_ > _upper(old) + _UNSEEN",
            LIMITS,
        ),
        "compare passes another attack under one label": swap(
            "fedsim/report/limits.py:grown",
            "_other_attack(old, new) + _more(old, new, gone)",
            "_more(old, new, gone)",
            LIMITS,
        ),
        "compare passes features that are exact now": swap(
            "fedsim/report/limits.py:_more",
            "metric.gain(value.mean, earlier.mean)",
            "value.mean - earlier.mean",
            LIMITS,
        ),
        "check passes where the attack that works was left out": swap(
            "fedsim/report/limits.py:_list_untried", "max(trials, 1)", "trials", LIMITS
        ),
        "an attack that crashed counts as one that does not work": swap(
            "fedsim/report/judge.py:_control",
            "control.status != 'failed' or not failures",
            "control",
            "tests/report/test_judge.py",
        ),
        "an app of text is told to add the witness that it has": swap(
            "fedsim/recording/witnessed.py:read_witnessed",
            "_unseen(folder)",
            "''",
            "tests/federation/test_witness.py",
        ),
    },
    # Any noise can be accounted for.
    10: {
        "divergences beyond what rounding leaves of them": swap(
            "fedsim/privacy/ledger.py:_renyi", "_AMPLIFIED[1]", "1000000000000.0", EXTREMES
        ),
        "a curve of losses without its rounding": swap(
            "fedsim/privacy/composition/poisson.py:least_bound",
            "distribution(sampling_rate, noise, steps)",
            "distribution(sampling_rate, noise, 1)",
            EXTREMES,
        ),
        "participations counted at the least of each group": swap(
            "fedsim/privacy/composition/correlated.py:_norms_by_count",
            "prepend=0.0",
            "append=1.0",
            EXTREMES,
        ),
        "a claim on noise that rounding swallows": swap(
            "fedsim/privacy/ledger.py", "_LARGEST = 1000000000.0", "_LARGEST = math.inf", STATED
        ),
    },
    # N trials are n victims.
    11: {
        "a client that trains on candidates which its coins hold out": swap(
            "fedsim/training/client.py:CandidateSplit.held_out",
            "~self.members",
            "self.members",
            "tests/training/test_workload.py",
        ),
        "victims drawn anew in each trial": swap(
            "fedsim/data/batches.py:of_trial", "(step * trials + trial) * batch_size", "0", VICTIMS
        ),
        "victims drawn independently in each trial": swap(
            "fedsim/training/client.py:Client._batches",
            "self._victims(training, round, probe, step, trials)",
            "None",
            VICTIMS,
        ),
        "more trials than images": never(
            "fedsim/training/client.py:Client.check_victims", "trials * needed > held", VICTIMS
        ),
        "the same image held twice is two victims": swap(
            "fedsim/data/batches.py:distinct",
            "streams.of_bytes(content)",
            "index + 0 * streams.of_bytes(content)",
            VICTIMS,
        ),
        "another update of the same image": swap(
            "fedsim/results/controls.py:_unlike",
            "not set(row['victims']) & set(other['victims'])",
            "True",
            VICTIMS,
        ),
        "another release of the same row": swap(
            "fedsim/results/controls.py:_other_targets",
            "other[turn] != victim",
            "other[turn]",
            VICTIMS,
        ),
        "n counts runs": swap(
            "fedsim/report/leaderboard.py:_aggregate",
            "units(rows)",
            "[[i] for i in range(len(rows))]",
            VICTIMS,
        ),
        "runs of other seeds are dropped as copies": swap(
            "fedsim/results/reading.py:measurements", "str(run.setting('seed'))", "''", IDENTITY
        ),
        "of trials that share an image the luckiest counts": swap(
            "fedsim/report/leaderboard.py:_aggregate.measured",
            "sum(unit) / len(unit)",
            "max(unit)",
            BESIDE,
        ),
        "images counted once for each trial": swap(
            "fedsim/report/leaderboard.py:images",
            "{victim for victims in recorded for victim in victims}",
            "[victim for victims in recorded for victim in victims]",
            BESIDE,
        ),
        "each trial is a network": swap(
            "fedsim/report/leaderboard.py:_aggregate",
            "{row.folder for row in rows}",
            "rows",
            "tests/validity/test_leaderboard.py::"
            "test_an_interval_is_of_as_many_networks_and_clients_as_were_attacked",
        ),
    },
    # Results do not depend on `--workers`.
    12: {
        "a run computes on as many threads as its machine likes": swap(
            "fedsim/system/threads.py:fix_within",
            "before = torch.get_num_threads()",
            "before = threads = torch.get_num_threads()",
            THREADS,
        ),
        "a worker computes on as many threads as its machine likes": drop(
            "fedsim/attacking/question.py:_surroundings", "threads.fix(around.threads)", THREADS
        ),
        "near copies are copies to the last bit": swap(
            "fedsim/scoring/guess.py",
            "(16, 0.99)",
            "(16, 0.9999999)",
            "tests/scoring/test_guess.py::test_near_copies_are_told_from_other_images",
        ),
    },
    # The strongest attack is marked.
    13: {
        "a failed attack marked strongest": drop(
            "fedsim/report/row.py:LeaderboardRow.standing", "float(self.n_ok > 0)", BOARD
        ),
        "all failed, and one marked": swap(
            "fedsim/report/leaderboard.py:_mark_strongest",
            "line.n_ok > 0 and (not line.is_uninformed)",
            "not line.is_uninformed",
            BOARD,
        ),
        "chance is taken for learning": swap(
            "fedsim/scoring/accuracy.py:Accuracy.is_chance",
            "self.low <= self.chance",
            "self.share < self.chance",
            BOARD,
        ),
        "one invalid comparison marks another": swap(
            "fedsim/report/render.py:_validity",
            "row.comparison not in invalid",
            "not invalid",
            BOARD,
        ),
        "chance is one over the classes however uneven": swap(
            "fedsim/training/server.py:Server.test_set",
            "float(labels.bincount().max()) / count",
            "1 / len(labels.bincount())",
            BESIDE,
        ),
        "seconds of the last restart alone": swap(
            "fedsim/contracts/attack.py:solve",
            "state = attack.init(...)",
            "start = time.perf_counter()\nstate = attack.init(observation, knowledge, "
            "rng.generator(seed, 'attack', restart))",
            BESIDE,
        ),
        "bytes of a client counted over those who did not answer": swap(
            "fedsim/results/rows.py:_per_client",
            "len(row['participants']) - sum(row['failures'].get(why, 0) for why in SILENT)",
            "len(row['participants'])",
            BESIDE,
        ),
        "the best of many shares with the interval of one": swap(
            "fedsim/scoring/statistics.py:Share.best_of",
            "1 - (1 - self.confidence) / compared",
            "self.confidence",
            BESIDE,
        ),
        "accuracy as sure as of the largest test set": swap(
            "fedsim/report/leaderboard.py:accuracy_of", "min(sizes)", "max(sizes)", BESIDE
        ),
        "training that diverges at ten times its loss": swap(
            "fedsim/results/lines.py", "_DIVERGED = 2.0", "_DIVERGED = 10.0", BESIDE
        ),
    },
    # A killed run leaves nothing behind.
    14: {
        "two runs fill one folder": drop(
            "fedsim/pipeline.py:run",
            "until_the_end.enter_context(lock_folder(root))",
            "tests/system/test_processes.py::test_a_folder_in_use_is_refused",
        ),
        "a run overwrites one that came in between": swap(
            "fedsim/pipeline.py:run",
            "execution.refuse_other_run()",
            "pass",
            "tests/system/test_processes.py::"
            "test_a_folder_that_filled_up_in_the_meantime_is_refused",
        ),
    },
    # Bad input is refused.
    15: {
        "a NaN in a line of results": swap(
            "fedsim/results/record.py:strict_json",
            "json.loads(text, parse_constant=_no_number, parse_float=_finite)",
            "json.loads(text)",
            BAD_INPUT,
        ),
        "a device read as a file": drop(
            "fedsim/system/paths.py", "(stat.S_ISCHR, 'a device')", PATHS
        ),
        "a file opened beside the one way": swap(
            "fedsim/privacy/mechanisms/normal.py:_read",
            "paths.text(path, paths.TEXT)",
            "path.read_text()",
            PATHS,
        ),
        "a model built before it is counted": swap(
            "fedsim/models/size.py:check", "_COPIES * size.state", "0", BAD_INPUT
        ),
    },
    # A passed control means a leak.
    16: {
        "a certificate that uses the truth": swap(
            "fedsim/scoring/certificates.py:certificate",
            "told.get('certified')",
            "told.get('certified', 0) - (false_certificates(found, truth) or 0) if truth else None",
            CERTIFICATES,
        ),
        "a loosened bound of what a certified answer leaves": swap(
            "attacks/classifier_features/_certificates.py:tolerance",
            "_ROUNDING * classifier.rounding",
            "100000.0 * classifier.rounding",
            CERTIFICATES,
            CERTIFIED_IMAGES,
        ),
        "classes that no image is taken for speak for a certificate": swap(
            "attacks/classifier_features/_certificates.py:exceeds_chance",
            "rows[1:] / rows.square().sum().sqrt()",
            "torch.ones_like(rows[1:])",
            CERTIFIED_IMAGES,
        ),
        "a lost trial makes exact pictures unseen": swap(
            "fedsim/report/judge.py:_level_by_gains",
            "certain > 0 and several or row.exposed",
            "certain > 0 and several",
            BOARD,
        ),
        "features of any update as a leak": swap(
            "fedsim/report/judge.py:leaks_by_mean",
            "upper <= target.leaks * row.guess_of(name) and (not uninformed)",
            "upper <= target.leaks * row.guess_of(name)",
            BOARD,
        ),
        "a prior as the positive control": swap(
            "fedsim/report/judge.py:_judge_control", "best.is_uninformed", "False", BOARD
        ),
        "a lost update that hides the other trials": swap(
            "fedsim/report/leaderboard.py:gains", "differences.append(0.0)", "return None", BOARD
        ),
        "true labels that an attack can write into": swap(
            "fedsim/attacking/knowledge.py:hand_over",
            "labels.to(device, copy=True)",
            "labels.to(device)",
            FOREIGN,
        ),
        "an attack that draws from what other jobs left": swap(
            "fedsim/attacking/question.py:Question.answer",
            "rng.global_stream(...)",
            "__import__('contextlib').nullcontext()",
            FOREIGN,
        ),
        "some leakage by one trial": swap(
            "fedsim/report/judge.py:_level_by_gains",
            "min(gain.n, gain.n if over is None else over.n) >= LEAST",
            "True",
            BOARD,
        ),
        "equal values with an interval of no width": swap(
            "fedsim/scoring/statistics.py:summarize",
            "len(sample) >= LEAST and spread > _ROUNDING * float(np.abs(sample).max())",
            "len(sample) >= LEAST",
            STATISTICS,
        ),
        "a share with an interval that misses what is rare": swap(
            "fedsim/scoring/statistics.py:share",
            "betaincinv(count + 1, n - count, 1 - tail)",
            "betaincinv(max(count, 1e-9), n - count + 1, 1 - tail)",
            STATISTICS,
        ),
        "the best of many with the interval of one": swap(
            "fedsim/scoring/statistics.py:Summary.best_of",
            "1 - (1 - self.confidence) / compared",
            "self.confidence",
            STATISTICS,
        ),
        "gray pixels for an image that nobody reconstructed": swap(
            "fedsim/targets/images.py:Images.compare",
            "aid_of(aids)",
            "aid_of(aids) if aids else ImageAid(fill=0 * truth.tensors()['images'][0] + 0.5)",
            ROAD,
        ),
        "labels saved beside other images than they came with": swap(
            "fedsim/contracts/target.py:Target.tensors_to_save",
            "align(answer, order, self.filling(true, aids))",
            "answer",
            ROAD,
        ),
        "a prior ranked above what sees": drop(
            "fedsim/report/row.py:LeaderboardRow.standing", "float(not self.is_uninformed)", BOARD
        ),
        "a prior marked strongest": swap(
            "fedsim/report/leaderboard.py:_mark_strongest",
            "line.n_ok > 0 and (not line.is_uninformed)",
            "line.n_ok > 0",
            BOARD,
        ),
        "a prior that lends the verdict its gain": swap(
            "fedsim/report/judge.py:_verdict",
            "r.own_gain if strongest.is_uninformed else r.gain",
            "r.gain",
            BOARD,
        ),
        "a trial exposed by two halves": swap(
            "fedsim/report/leaderboard.py:own_gains", "min(gain, over)", "gain", BOARD
        ),
        "a rare exact picture hidden by a steady attack": never(
            "fedsim/report/judge.py:_strongest", "leaks", BOARD
        ),
        "a single trial without a word on its control": swap(
            "fedsim/report/leaderboard.py:_no_control",
            "not ok or any((row.other_update for row in ok))",
            "True",
            BOARD,
        ),
        "labels of any update as a leak": swap(
            "fedsim/report/judge.py:fits_any_update",
            "over.mean < told.leaks",
            "False",
            BOARD,
        ),
        "memberships of any release as a leak": swap(
            "fedsim/report/judge.py:leaks_told",
            "not fits_any_update(row, what)",
            "True",
            BOARD,
        ),
        "memberships of any release as the control": swap(
            "fedsim/report/judge.py:_does_no_better",
            "over_other is not None and over_other.certain <= 0",
            "False",
            BOARD,
        ),
        "a verdict that forgets among how many it chose": swap(
            "fedsim/report/judge.py:count_compared",
            "max(1, sum((row.n_ok > 0 and measure(row) is not None for row in rows)))",
            "1",
            BOARD,
        ),
        "the best of many by one trial": swap(
            "fedsim/report/judge.py:_level_by_gains",
            "certain >= row.main.leaks and (several or gain.compared == 1)",
            "certain >= row.main.leaks",
            BOARD,
        ),
        "a poor guess without a warning": swap(
            "fedsim/scoring/guess.py:guess_problem", "public_per_image >= _NEEDED", "True", BOARD
        ),
        "features held against no guess": swap(
            "fedsim/report/row.py:LeaderboardRow.guess_of",
            "self.baseline[name]",
            "None",
            BOARD,
        ),
        "a field of results that no document describes": swap(
            "fedsim/results/lines.py:ResultRow.dump",
            "exclude=beside",
            "exclude=beside - {'folder'}",
            "tests/results/test_formats.py",
        ),
        "features guessed from nothing": swap(
            "fedsim/targets/features.py:Features.guess", "public is None", "True", ROAD
        ),
        "a prior in the picture of what leaks": swap(
            "fedsim/report/row.py:LeaderboardRow.standing",
            "float(not self.is_uninformed)",
            "0.0",
            "tests/report/test_overview.py",
        ),
        "a certificate is right from a cosine of 0.9": swap(
            "fedsim/scoring/certificates.py", "COSINE = 0.999", "COSINE = 0.9", BESIDE
        ),
        "a refusal ends as a failure does": swap(
            "fedsim/cli/shared.py:_status",
            "2 if isinstance(error, FedsimError) else None",
            "1 if isinstance(error, FedsimError) else None",
            BESIDE,
        ),
        "a failure ends as a refusal does": swap(
            "fedsim/cli/shared.py:_status", "return 1", "return 2", BESIDE
        ),
        "a broken limit ends well": swap(
            "fedsim/cli/commands.py:_judge", "typer.Exit(1)", "typer.Exit(0)", BESIDE
        ),
        "certificates of the best trial alone": swap(
            "fedsim/report/leaderboard.py:_certificates.total", "sum(known)", "max(known)", BESIDE
        ),
        "failed trials count as ok": swap(
            "fedsim/report/leaderboard.py:_aggregate", "len(ok)", "len(rows)", BESIDE
        ),
        "one start for all trials of a client": drop(
            "fedsim/attacking/jobs.py:seed_of", "observation.trial", BESIDE
        ),
    },
    # The server cannot reach clients' data.
    17: {
        "a server that holds its clients' data": swap(
            "fedsim/training/workload.py:Workload.server",
            "self.described",
            "self.dataset",
            "tests/training/test_server.py",
        ),
    },
    # A sum of masked vectors hides each of them.
    18: {
        "a client gives up both secrets of another": drop(
            "fedsim/federation/secure_aggregation/client.py:SumClient.agree",
            "in_sum & out",
            REFUSALS,
        ),
        "a model for one client alone is opened": swap(
            "fedsim/federation/secure_aggregation/client.py:SumClient.agree",
            "not self._vouches(client, signatures)",
            "client not in signatures",
            REFUSALS,
        ),
        "a server's own keys stand for a client's": swap(
            "fedsim/federation/secure_aggregation/client.py:SumClient._check",
            "self._identity.vouches(client, statement, one.signature)",
            "statement",
            REFUSALS,
        ),
        "a stage is answered twice": swap(
            "fedsim/federation/secure_aggregation/client.py:SumClient._stage",
            "self.memory.done != at",
            "self.memory.done > at + 1",
            REFUSALS,
        ),
        "few clients share masks with some of the others": swap(
            "fedsim/federation/secure_aggregation/terms.py:Terms.neighbours",
            "self.complete",
            "2 * reach >= len(everyone)",
            "tests/federation/secure_aggregation/test_graph.py",
        ),
        "a wrong seed takes off another mask": swap(
            "fedsim/federation/secure_aggregation/server.py:SumServer.reveal",
            "not hmac.compare_digest(secrets.commit(seed, session), "
            "self._directory[client].commitment)",
            "False and (not hmac.compare_digest(secrets.commit(seed, session), "
            "self._directory[client].commitment))",
            REFUSALS,
        ),
        "rounding makes an update longer than its noise covers": swap(
            "fedsim/federation/secure_aggregation/layout.py:_round_vector",
            "math.isinf",
            "math.isfinite",
            FIXED_POINT,
        ),
        "noise of those who drop out is counted on": swap(
            "fedsim/contracts/defense.py:SumTerms.client_noise",
            "participants * (self.threshold - self.colluding)",
            "participants",
            FIXED_POINT,
        ),
        "rounding goes one way": swap(
            "fedsim/federation/secure_aggregation/layout.py:_round_vector",
            "part + rng.uniform((len(part),), stream).numpy()",
            "part",
            FIXED_POINT,
        ),
        "a client that adds up in secret also answers in the open": swap(
            "fedsim/federation/client_app.py:FederationClient._respond",
            "self.workload.protocol",
            "not self.workload",
            SECURE,
        ),
        "a round is opened for two sets of clients": swap(
            "fedsim/federation/secure_aggregation/answers.py:Answers.agree",
            "partial(state.open_sum, sum.round, signatures)",
            "partial(state.open_sum, sum.round, {})",
            SECURE,
        ),
        "clients that are told of different sums open one of fewer": swap(
            "fedsim/federation/secure_aggregation/client.py:SumClient.unmask",
            "agreed < self._terms.quorum",
            "agreed < 1",
            REFUSALS,
        ),
        "a sum counts a client whose shares were withheld": swap(
            "fedsim/federation/secure_aggregation/client.py:SumClient.agree",
            "in_sum & set(self._neighbours(self._directory())) <= held",
            "in_sum",
            REFUSALS,
        ),
        "clients of different scenarios are in one sum": swap(
            "fedsim/federation/secure_aggregation/plan.py:terms",
            "[fingerprint(server.scenario, server.stack_name), list(server.census.held)]",
            "[server.scenario.seed]",
            SECURE,
        ),
        "masks of one session serve another": swap(
            "fedsim/federation/secure_aggregation/secrets.py:agree_key",
            "b'fedsim secure aggregation\\x00' + who + purpose.encode() + b'\\x00' + session",
            "b'fedsim secure aggregation\\x00' + who + purpose.encode() + b'\\x00'",
            "tests/federation/secure_aggregation/test_secrecy.py",
        ),
    },
}
"""The claim that a review refuted, what is wrong then, and the change that makes it so."""

MUTATIONS = tuple(
    replace(mutation, name=name)
    for faults in _BY_SECTION.values()
    for name, mutation in faults.items()
)
