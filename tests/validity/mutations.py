"""Faults that made leakage numbers wrong, as changes of the syntax that put each one back.

A fault counts as met only if the fast suite fails with it: `test_mutations.py` applies each to a
copy of the project and runs the tests that are named. See `mutate.py` for how the table is read,
and for what a piece of syntax matches.
"""

from __future__ import annotations

from mutate import read_table

MUTATIONS = read_table(r"""
# Ε holds although mean and std come from private images.
a learner that steps around the stack
    fedsim/federation/refusals.py:_a_client_can_train [validity/test_stated_epsilon]
    not stack.directed => False
a clipped gradient above its bound by rounding
    defenses/per_example.py:_clipped_sum [validity/test_stated_epsilon]
    norm * slack => norm
a mean of very many examples in float32
    defenses/per_example.py:clipped_mean [validity/test_stated_epsilon]
    drop dtype=torch.float64
a claim beside tensors that no defense acts on
    fedsim/privacy/ledger.py:_not_covered [validity/test_stated_epsilon]
    bool(entry.unprotected) => False
images in the order of their classes
    fedsim/data/folder.py:_in_order [validity/test_sensitivity]
    (item.client, item.name, item.class_name) => (item.class_name, item.client, item.name)
a claim where labels decide on places
    fedsim/training/source.py:private_statistics [validity/test_sensitivity]
    partition in _BY_PLACE => not partition
a claim behind a limit by classes
    fedsim/data/folder.py:ImageFolder.load [validity/test_sensitivity]
    (_LIMIT,) if cut else () => ()
clients' images normalize clients' images
    fedsim/data/folder.py:ImageFolder._normalize [validity/test_sensitivity]
    never self.normalization == 'declared'
private statistics void nothing
    fedsim/privacy/ledger.py:_not_covered [validity/test_sensitivity]
    entry.private_statistics.get(mechanism.unit, ()) => ()
a source that does not say is believed
    fedsim/training/source.py:private_statistics [validity/test_sensitivity]
    drop f'data source {dataset.name} does not declare {kind}.private_statistics'
weights of unknown origin are believed
    fedsim/training/source.py:private_statistics [validity/test_sensitivity]
    found += (_WEIGHTS,) => pass
an audit's worlds share their statistics
    fedsim/training/workload.py:Workload.of_neighbours [validity/test_sensitivity]
    build_source(self.scenario.data.source).prepared(dataset) => dataset
digits normalized by their own mean
    fedsim/data/bundled.py:_dataset [data/test_bundled]
    mean => (float(images[train].double().mean()) / 255,) * len(mean)
the sum of many clients' updates in float32
    defenses/aggregate.py:sum_updates [validity/test_stated_epsilon]
    drop torch.float64
noise of a server that ignores the rounding of its sum
    defenses/dp_ftrl.py:DPFTRL.add_noise [validity/test_stated_epsilon]
    round.sensitivity * (1 + _ROUNDING * round.clients) => round.sensitivity
an epsilon refuted by less than a factor of two holds
    fedsim/audit/mechanisms.py:MechanismVerdict.holds [validity/test_beside_leakage]
    self.claim => 2 * self.claim
all trials of a size have one noise
    fedsim/training/client.py:Client._path [validity/test_beside_leakage]
    drop probe.trial
the strongest claim stands for all rows
    fedsim/report/leaderboard.py:_pooled_claim [validity/test_beside_leakage]
    max(stated, key=lambda claim: float(claim.epsilon or 0.0))
    => min(stated, key=lambda claim: float(claim.epsilon or 0.0))
the least delta stands for all rows
    fedsim/report/leaderboard.py:_pooled_claim [validity/test_beside_leakage]
    max(deltas) => min(deltas)
the least bound of an audit stands for all
    fedsim/report/leaderboard.py:_claimed [validity/test_beside_leakage]
    max((each for each in audited if each is not None), default=None)
    => min((each for each in audited if each is not None), default=None)
a limit of membership where presence is not claimed
    fedsim/results/rows.py:_membership_limits [validity/test_beside_leakage]
    guarantee.relation != 'add_or_remove' => guarantee.relation is None
a participant that forgets its own noise
    fedsim/training/accounting.py:_accounted_stack [validity/test_who_holds_the_noise]
    seen_from == 'client' => seen_from == 'nobody'
shared noise of clients that collude
    defenses/secure_aggregation.py:SecureAggregation.guarantee [validity/test_who_holds_the_noise]
    before.pooled.with_share(1 - self.colluding) => before.pooled
an ideal that a deployment's server computes itself
    fedsim/training/accounting.py:_accounted_stack [validity/test_who_holds_the_noise]
    build_engine(server.scenario.federation.engine).remote => False
a limit of ε kept by what is no differential privacy
    fedsim/report/limits.py:_why_not_kept [report/test_limits]
    claim.relation in NO_DIFFERENTIAL_PRIVACY => claim.relation in ()
a limit of ε kept by what an attack refutes
    fedsim/report/limits.py:_refuted_by_attack [report/test_limits]
    least > most => least > 1
a share of members that refutes no ε
    fedsim/report/row.py:is_refuted_by_members [report/test_limits]
    self.membership_p <= _REFUTING_LEVEL => False
a client that refutes an ε, averaged away
    fedsim/report/leaderboard.py:_corrected_p [report/test_limits]
    min(found) => sum(found) / len(found)
a claim that many attempts refute by chance
    fedsim/report/leaderboard.py:_corrected_p [report/test_limits]
    attempts * min(found) => min(found)
a client that keeps an ε between its going and coming
    fedsim/privacy/membership.py:row_claim [privacy/test_update_membership_limits]
    2 * epsilon => epsilon
members that δ shows together, each counted for itself
    fedsim/privacy/membership.py:share_p_value [privacy/test_update_membership_limits]
    2 * (members + others) * delta / (i + 1) => 0.0
the span of several answers with the limit of one
    fedsim/privacy/recovery.py:direction_chances [privacy/test_recovery_limits]
    betainc((dimension - answers) / 2, answers / 2, squares)
    => answers * betainc((dimension - 1) / 2, 0.5, squares)
noise whose low bits are shown
    fedsim/contracts/defense.py:_rounded_to [defenses/test_low_bits]
    2.0 ** 52 => 0
a sum of half precision that overflows
    defenses/aggregate.py:_RunningMean.read [defenses/test_low_bits]
    torch.promote_types(kept, torch.float32) => kept
one look at noise that spares a tensor
    fedsim/audit/two_worlds.py:_choose_look [audit/test_noise_structure]
    best if told[best] > _GAIN * told[0] else 0 => 0
no Rényi divergence below the rounding of losses
    fedsim/privacy/composition/poisson.py:least_bound [privacy/composition/test_poisson]
    drop bounds.append((_renyi(noise, epsilon, steps, sampling_rate), RENYI))
the paper's Gaussian step beyond ε = 1
    fedsim/privacy/baselines.py:kan_epsilon [privacy/baselines/test_kan_paper]
    max(_classical(delta) * reach / noise, exact) => _classical(delta) * reach / noise
a release of nothing that is composed
    fedsim/privacy/composition/curves.py:epsilon [privacy/test_asked_epsilon]
    _at(curve, 0.0) > -math.inf => curve
a file's split that follows from its length
    fedsim/data/table.py:TableFile.load [data/test_tables]
    drop split_by_row=True

# A probe costs what the row's training costs.
a probe carries the training's batch size
    fedsim/training/accounting.py:claim_of [validity/test_claims]
    declared.as_probed(seen.training.batch_size) => declared
probes are left out of the run's claim
    fedsim/training/spending.py:Account.entries [validity/test_claims]
    drop probes=self._list_probed(most.probed) if probes else ()

# Ε without unit, neighbours and δ is a claim.
an epsilon rounded down where it is written
    fedsim/words.py:format_epsilon [validity/test_stated_epsilon]
    _round_to(epsilon, 3, ROUND_CEILING) => _round_to(epsilon, 3, ROUND_HALF_EVEN)
assumptions that the data contradict are believed
    fedsim/federation/refusals.py:_data_keep_to_the_claim [validity/test_assumptions]
    drop workload.check_assumptions()
rows longer than their bound
    fedsim/types.py:Table.__post_init__ [validity/test_assumptions]
    ~(norms <= self.row_norm * (1 + _ROUNDING)) => norms < 0
an epsilon without its unit, relation and delta
    fedsim/words.py:format_claim [validity/test_claims]
    f"{format_epsilon(epsilon)} ({', '.join(words)})" => format_epsilon(epsilon)

# A recording says nothing of the noise in it.
noise of the server used again for another sum
    fedsim/federation/tap.py:TapGrid._combine [federation/test_federation_tap]
    notes.use_once(release_key(self._round, probe), [combined.tensors]) => pass
noise used again at other weights
    fedsim/federation/noise_use.py:NoiseNotes.use_once [federation/test_federation_client]
    never before and at not in before
rounds in descending order are answered
    fedsim/federation/noise_use.py:NoiseNotes.refuse_past [federation/network/test_one_answer]
    own[0] < last and (not is_released) => own[0] < 0
an answer is repeated with other bytes
    fedsim/federation/noise_use.py:NoiseNotes.note_release [federation/network/test_one_answer]
    entry.setdefault('release', at) != at => entry.setdefault('release', at) is None
a greeting makes a node forget its steps
    fedsim/federation/client_state.py:ClientState.rewind [federation/network/test_one_answer]
    max([done, *self._notes.rounds()]) => done
a run of another census
    fedsim/federation/network/home.py:pin_run [federation/network/test_one_answer]
    (held, 'a run of clients with other numbers of examples')
    => ('', 'a run of clients with other numbers of examples')
noise of a server's words
    fedsim/federation/network/node_app.py:NodeApp._build [federation/network/test_one_answer]
    ['noise', stack, *pins] => ['noise', stack, *pins, held]
noise in the server's order of tensors
    fedsim/federation/wire.py:read_order [federation/network/test_one_answer]
    decode_like(parameters, form[0]) if form else decode(parameters) => decode(parameters)
what fedsim validate refuses is answered
    fedsim/federation/network/node_app.py:NodeApp._check [federation/network/test_one_answer]
    resolve(scenario.model_copy(update=own)) => scenario.model_copy(update=own)
one noise at two δ
    fedsim/federation/checkpoint.py:fingerprint [training/test_fingerprint]
    scenario.privacy != Privacy() => scenario.privacy is None
two spellings of a key have one mask
    fedsim/federation/secure_aggregation/secrets.py:agree_key
    [federation/secure_aggregation/test_refusals]
    list_entries(keys) => b''
keys that are not canonical
    fedsim/federation/secure_aggregation/secrets.py:_check_public
    [federation/secure_aggregation/test_refusals]
    drop number >= _PRIME
a sketch drawn from 32 bits
    fedsim/learners/closed_form.py:ClosedForm.compute [validity/test_stated_epsilon]
    request.stream => torch.Generator().manual_seed(request.stream.initial_seed())
the scenario's seed in every observation
    fedsim/training/server.py:Server.observation [validity/test_seeds]
    self.scenario.attack_seed => self.scenario.seed
streams of 32 bits
    fedsim/rng.py:Stream.__init__ [validity/test_seeds]
    self.set_state(_mersenne_state(material))
    => self.manual_seed(int.from_bytes(hashlib.sha256(material).digest()[:4]))
noise from the generator of simulations
    fedsim/contracts/defense.py:standard_normal [validity/test_seeds]
    normal(tensor.shape, rng, torch.float64).to(tensor.device)
    => torch.randn(tensor.shape, generator=rng, dtype=torch.float64)
pairs of least distance in place of least squared error
    fedsim/contracts/metric.py:match [validity/test_beside_leakage]
    distance.square() => distance

# Results are the same on another processor.
a neuron at the kink is decided by rounding
    attacks/head_features/activation_features.py:Peeling._single_images
    [attacks/head_features/test_feature_attacks]
    -slack => 0

# Attacks know a defense by its name.
an own attack blind to noise
    attacks/head_features/_head_gradient.py:HeadGradient.read [validity/test_effects]
    effect.noisy => False
an own attack blind to pruning
    attacks/head_features/_head_gradient.py:HeadGradient.read [validity/test_effects]
    effect.removed is not None => False
bounds of removed entries ignored
    attacks/gradient_matching/_matching.py:removal_bounds [validity/test_effects]
    effect.removed is None => effect.removed
a stack that drops what a second defense does
    fedsim/types.py:Effect.then [validity/test_effects]
    self.noise + after.noise => self.noise or after.noise
a foreign defense is taken for none
    fedsim/types.py [validity/test_effects]
    drop known=False

# Bootstrap intervals of few trials cover 95%.
one image guessed for all of a batch
    fedsim/scoring/guess.py:Guesser._learn [scoring/test_guess, validity/test_victims]
    everything.guess(chosen, count) => everything.guess('mean_image', count)
the guess ignores granted labels
    fedsim/targets/images.py:guessed_batch [validity/test_victims]
    truth['labels'].tolist() if request.granted.labels == 'known' else None => None
what is filled in comes of the truth
    fedsim/targets/images.py:Images.compare [validity/test_victims]
    align(answer, assignment, aid.fill) => align(answer, assignment, true.mean(0))
few public images are learned by heart
    fedsim/scoring/guess.py:_PublicPool.families [scoring/test_guess]
    [*plain, learned] if count <= _MAX_LEARNED else plain => [learned]
labels alone are guessed by the majority
    fedsim/scoring/guess.py:Guesser._learn [scoring/test_guess]
    _likeliest(self._labels, count) if granted is None else torch.tensor(granted)
    => self._labels.bincount().argmax().repeat(count)
a control without the attack's stretching
    attacks/gradient_matching/prior_only.py:PriorOnly.postprocess
    [attacks/gradient_matching/test_prior_only]
    expose(state.best, state.drawing.box) if self.stretched else state.best => state.best
an interval of 90% that is labelled 95%
    fedsim/scoring/statistics.py:_quantile [scoring/test_statistics]
    (1 + confidence) / 2 => 0.95 if confidence == 0.95 else (1 + confidence) / 2
intervals of two values
    fedsim/scoring/statistics.py [scoring/test_statistics]
    LEAST = 3 => LEAST = 2

# The honesty tests find faults.
a restart picked by PSNR
    fedsim/attacking/running.py:_AskedJob.__init__ [validity/test_road]
    self._left = questions(...) =>
    first = seed_of(observation, job.attack)
    from fedsim.attacking.knowledge import question
    from fedsim import scoring
    tries = {first + k: question(attack, observation, truth, setting.granted, first + k) for k in
        range(job.restarts)}
    best = max(tries, key=lambda seed: scoring.score(tries[seed].reconstruction, truth)['psnr'])
    self._left = questions(attack, observation, truth, setting.granted, best, public=public,
        restarts=1)
the victim's batch-norm buffers recorded as the global ones
    fedsim/federation/tap.py:TapGrid._save [validity/test_road]
    self._buffers => seen.update.buffers or self._buffers
probes always in eval mode
    fedsim/types.py:LocalTraining.as_probed [validity/test_road]
    replace(self, batch_size=batch_size, sampling='without_replacement')
    => replace(self, batch_size=batch_size, sampling='without_replacement', mode='eval')
true labels granted while rows say inferred
    fedsim/attacking/knowledge.py:questions [validity/test_road]
    hand_over(observation, truth, granted, public)
    => hand_over(observation, truth, Grant(labels='known'), public)
LPIPS with its own best pairing
    fedsim/targets/images.py:_perceive [validity/test_scoring]
    lpips(claimed, truth)
    => torch.stack([lpips(one.expand_as(truth), truth) for one in claimed], dim=1).min(1).values
unrecorded updates dropped
    fedsim/pipeline.py:_Execution._attack [validity/test_road]
    on_result(job, self._without_recording(seen)) => continue
the guess made of clients' training images
    fedsim/pipeline.py:_Execution._setting [validity/test_road]
    guess(self.described.test_images, self.described.test_labels)
    => guess(*(lambda data: (data.train_images, data.train_labels))(load_dataset(self.scenario)))
a black image as the guess
    fedsim/pipeline.py:_Execution._setting [validity/test_road]
    self.described.test_images => 0 * self.described.test_images
a black other_update
    fedsim/scoring/score.py:score_other [validity/test_road]
    score(made.with_parts(answers), truth)
    => score(made.with_parts({**answers, 'images': 0 * answers['images']}), truth)
failed trials dropped from the mean
    fedsim/report/leaderboard.py:_count_failures [validity/test_leaderboard]
    values = ... =>
    rows = [row for row in rows if row.ok]
    values = [value_of(row.metrics, name) for row in rows]
a restart without a finite loss wins
    fedsim/contracts/attack.py:solve [validity/test_restarts]
    best = min(...) =>
    finite = [loss for loss in losses if math.isfinite(loss)]
    best = finite.index(min(finite, default=math.inf)) if finite else 0
an answer that is not finite may win
    fedsim/contracts/attack.py:solve [validity/test_restarts]
    result.loss if _is_finite(result) else math.nan => result.loss
pictures rescaled to their own range
    fedsim/report/pictures.py:save_grid [validity/test_road]
    _as_bytes(truth, reconstruction)
    => _as_bytes(*(((t - truth.min()) / (truth.max() - truth.min())).clamp(0, 1) for t in (truth,
        reconstruction)))
aggregation by float masks of a shared secret
    defenses/aggregate.py:Aggregate.combine
    [defenses/test_defense_contracts, defenses/test_aggregate]
    tensors.read()
    => {name: tensor + 1e4 - 1e4 if tensor.is_floating_point() else tensor for name, tensor in
        tensors.read().items()}

# Rivals behind a planted head are compared fairly.
a run's rows are dropped for those of another of its name
    fedsim/results/reading.py:trial_of [results/test_identity]
    row.content => row.place
runs of one name with other figures are pooled
    fedsim/results/reading.py:_contradictions [results/test_identity]
    stated.setdefault(place, content) != content => stated.setdefault(place, content) is None
runs of one text and of other data are pooled
    fedsim/results/reading.py:_origins [results/test_identity]
    len({run.origin for run in runs if run.origin}) < 2
    => len({run.origin for run in runs if run.origin}) < 99
a rival that is asked for the body and matches the head
    attacks/gradient_matching/_matching.py:Matching.__init__
    [attacks/gradient_matching/test_matched_tensors]
    tensors == 'all' or not n.startswith('head.') => tensors or n
planted heads ranked among honest ones
    fedsim/report/row.py:LeaderboardRow.comparison [validity/test_leaderboard]
    self.threat => ThreatModel()
granted labels ranked with an honest server
    fedsim/report/threat.py:threat_model_of [results/test_threat_model]
    beyond = list(row.knowledge.beyond_honest()) => beyond: list[str] = []
what an attack brought along is not told apart
    fedsim/report/threat.py:threat_model_of [results/test_threat_model]
    beyond + [f'{_OWN}{thing}' for thing in row.attack.brought] => beyond
rows behind a planted head that call the server honest
    fedsim/types.py:server_of [validity/test_leaderboard, models/test_planting]
    'planted' if isinstance(head, Mapping) and head.get('planted') else 'honest' => 'honest'
rows of a malicious server without its mark
    fedsim/report/render.py:_grid [validity/test_leaderboard]
    [] if row.server == 'honest' else [f'({row.server})'] => []
a report on the batches of development
    scenarios/reconstruction/table3-small.yaml [scenario/test_scenarios]
    seed: 2027 => seed: 3
a comparison that leaves a rival only the drowned cosine
    scenarios/reconstruction/table3-small.yaml [scenario/test_scenarios]
    label: inverting_gradients_body, iterations: 950, tensors: body
    => label: inverting_gradients_body, iterations: 950
compare passes what grows within a wide interval
    fedsim/report/limits.py:_more [report/test_limits]
    is_ > _upper(old) + _UNSEEN or is_ - was >= new.main.leaks => is_ > _upper(old) + _UNSEEN
compare passes another attack under one label
    fedsim/report/limits.py:grown [report/test_limits]
    _other_attack(old, new) + _more(old, new, gone) => _more(old, new, gone)
compare passes features that are exact now
    fedsim/report/limits.py:_more [report/test_limits]
    metric.gain(value.mean, earlier.mean) => value.mean - earlier.mean
check passes where the attack that works was left out
    fedsim/report/limits.py:_list_untried [report/test_limits]
    max(trials, 1) => trials
an attack that crashed counts as one that does not work
    fedsim/report/judge.py:_control [report/test_judge]
    control.status != 'failed' or not failures => control
an app of text is told to add the witness that it has
    fedsim/recording/witnessed.py:read_witnessed [federation/test_tapping]
    _unseen(folder) => ''

# Any noise can be accounted for.
divergences beyond what rounding leaves of them
    fedsim/privacy/ledger.py:_renyi [privacy/test_extremes]
    _AMPLIFIED[1] => 1000000000000.0
a curve of losses without its rounding
    fedsim/privacy/composition/poisson.py:least_bound [privacy/test_extremes]
    _distribution(sampling_rate, noise, steps) => _distribution(sampling_rate, noise, 1)
participations counted at the least of each group
    fedsim/privacy/composition/correlated.py:_norms_by_count [privacy/test_extremes]
    prepend=0.0 => append=1.0
a claim on noise that rounding swallows
    fedsim/privacy/ledger.py [validity/test_stated_epsilon]
    _LARGEST = 1000000000.0 => _LARGEST = math.inf

# N trials are n victims.
a client that trains on candidates which its coins hold out
    fedsim/training/client.py:CandidateSplit.held_out [training/test_workload]
    ~self.members => self.members
victims drawn anew in each trial
    fedsim/data/batches.py:of_trial [validity/test_victims]
    (step * trials + trial) * batch_size => 0
victims drawn independently in each trial
    fedsim/training/client.py:Client._batches [validity/test_victims]
    self._victims(training, round, probe, step, trials) => None
more trials than images
    fedsim/training/client.py:Client.check_victims [validity/test_victims]
    never trials * needed > held
the same image held twice is two victims
    fedsim/data/batches.py:distinct [validity/test_victims]
    streams.of_bytes(content) => index + 0 * streams.of_bytes(content)
another update of the same image
    fedsim/results/controls.py:_unlike [validity/test_victims]
    not set(row['victims']) & set(other['victims']) => True
another release of the same row
    fedsim/results/controls.py:_other_targets [validity/test_victims]
    other[turn] != victim => other[turn]
n counts runs
    fedsim/report/leaderboard.py:_aggregate [validity/test_victims]
    group_apart(rows) => [[i] for i in range(len(rows))]
runs of other seeds are dropped as copies
    fedsim/results/reading.py:trial_of [results/test_identity]
    str(run.setting('seed')) => ''
of trials that share an image the luckiest counts
    fedsim/report/leaderboard.py:_aggregate.measured [validity/test_beside_leakage]
    sum(unit) / len(unit) => max(unit)
images counted once for each trial
    fedsim/report/leaderboard.py:count_images [validity/test_beside_leakage]
    {victim for victims in recorded for victim in victims}
    => [victim for victims in recorded for victim in victims]
each trial is a network
    fedsim/report/leaderboard.py:_aggregate
    [validity/test_leaderboard::test_an_interval_is_of_as_many_networks_and_clients_as_were_attacked]
    {row.folder for row in rows} => rows

# Results do not depend on `--workers`.
a run computes on as many threads as its machine likes
    fedsim/system/threads.py:fix_within [validity/test_threads]
    before = torch.get_num_threads() => before = threads = torch.get_num_threads()
a worker computes on as many threads as its machine likes
    fedsim/attacking/question.py:_surroundings [validity/test_threads]
    drop threads.fix(around.threads)
near copies are copies to the last bit
    fedsim/scoring/guess.py [scoring/test_guess::test_near_copies_are_told_from_other_images]
    (16, 0.99) => (16, 0.9999999)

# The strongest attack is marked.
a failed attack marked strongest
    fedsim/report/row.py:LeaderboardRow.standing [validity/test_leaderboard]
    drop float(self.n_ok > 0)
all failed, and one marked
    fedsim/report/leaderboard.py:_mark_strongest [validity/test_leaderboard]
    line.n_ok > 0 and (not line.is_uninformed) => not line.is_uninformed
chance is taken for learning
    fedsim/scoring/statistics.py:Accuracy.is_chance [validity/test_leaderboard]
    self.low <= self.chance => self.share < self.chance
one invalid comparison marks another
    fedsim/report/render.py:_validity [validity/test_leaderboard]
    row.comparison not in invalid => not invalid
chance is one over the classes however uneven
    fedsim/training/server.py:Server.test_set [validity/test_beside_leakage]
    float(labels.bincount().max()) / count => 1 / len(labels.bincount())
seconds of the last restart alone
    fedsim/contracts/attack.py:solve [validity/test_beside_leakage]
    state = attack.init(...) =>
    start = time.perf_counter()
    state = attack.init(observation, knowledge, rng.generator(seed, 'attack', restart))
bytes of a client counted over those who did not answer
    fedsim/results/rows.py:_per_client [validity/test_beside_leakage]
    len(row['participants']) - sum(row['failures'].get(why, 0) for why in SILENT)
    => len(row['participants'])
the best of many shares with the interval of one
    fedsim/scoring/statistics.py:Share.best_of [validity/test_beside_leakage]
    1 - (1 - self.confidence) / compared => self.confidence
accuracy as sure as of the largest test set
    fedsim/report/leaderboard.py:accuracy_of [validity/test_beside_leakage]
    min(sizes) => max(sizes)
training that diverges at ten times its loss
    fedsim/results/lines.py [validity/test_beside_leakage]
    _DIVERGED = 2.0 => _DIVERGED = 10.0

# A killed run leaves nothing behind.
two runs fill one folder
    fedsim/pipeline.py:run [system/test_processes::test_a_folder_in_use_is_refused]
    drop until_the_end.enter_context(lock_folder(root))
a run overwrites one that came in between
    fedsim/pipeline.py:run
    [system/test_processes::test_a_folder_that_filled_up_in_the_meantime_is_refused]
    execution.refuse_other_run() => pass

# Bad input is refused.
a NaN in a line of results
    fedsim/results/record.py:strict_json [test_bad_input]
    json.loads(text, parse_constant=_no_number, parse_float=_finite) => json.loads(text)
a device read as a file
    fedsim/system/paths.py [system/test_paths]
    drop (stat.S_ISCHR, 'a device')
a file opened beside the one way
    fedsim/privacy/mechanisms/normal.py:_read [system/test_paths]
    paths.text(path, paths.TEXT) => path.read_text()
a model built before it is counted
    fedsim/models/size.py:check [test_bad_input]
    _COPIES * size.state => 0

# A passed control means a leak.
a certificate that uses the truth
    fedsim/scoring/score.py:certificate [validity/test_false_certificates]
    told.get('certified')
    => told.get('certified', 0) - (false_certificates(found, truth) or 0) if truth else None
a loosened bound of what a certified answer leaves
    attacks/classifier_features/_certificates.py:tolerance
    [validity/test_false_certificates, attacks/classifier_features/test_certified_images]
    _ROUNDING * classifier.rounding => 100000.0 * classifier.rounding
classes that no image is taken for speak for a certificate
    attacks/classifier_features/_certificates.py:exceeds_chance
    [attacks/classifier_features/test_certified_images]
    rows[1:] / rows.square().sum().sqrt() => torch.ones_like(rows[1:])
a lost trial makes exact pictures unseen
    fedsim/report/judge.py:_level_by_gains [validity/test_leaderboard]
    certain > 0 and several or row.exposed => certain > 0 and several
features of any update as a leak
    fedsim/report/judge.py:_leaks_by_mean [validity/test_leaderboard]
    upper <= target.leaks * row.guess_of(name) and (not uninformed)
    => upper <= target.leaks * row.guess_of(name)
a prior as the positive control
    fedsim/report/judge.py:_judge_control [validity/test_leaderboard]
    best.is_uninformed => False
a lost update that hides the other trials
    fedsim/report/leaderboard.py:gains [validity/test_leaderboard]
    differences.append(0.0) => return None
true labels that an attack can write into
    fedsim/attacking/knowledge.py:hand_over [validity/test_foreign_attacks]
    labels.to(device, copy=True) => labels.to(device)
an attack that draws from what other jobs left
    fedsim/attacking/question.py:Question.answer [validity/test_foreign_attacks]
    rng.global_stream(...) => __import__('contextlib').nullcontext()
some leakage by one trial
    fedsim/report/judge.py:_level_by_gains [validity/test_leaderboard]
    min(gain.n, gain.n if over is None else over.n) >= LEAST => True
equal values with an interval of no width
    fedsim/scoring/statistics.py:summarize [scoring/test_statistics]
    len(sample) >= LEAST and spread > _ROUNDING * float(np.abs(sample).max())
    => len(sample) >= LEAST
a share with an interval that misses what is rare
    fedsim/scoring/statistics.py:share [scoring/test_statistics]
    betaincinv(count + 1, n - count, 1 - tail)
    => betaincinv(max(count, 1e-9), n - count + 1, 1 - tail)
the best of many with the interval of one
    fedsim/scoring/statistics.py:Summary.best_of [scoring/test_statistics]
    1 - (1 - self.confidence) / compared => self.confidence
gray pixels for an image that nobody reconstructed
    fedsim/targets/images.py:Images.compare [validity/test_road]
    aid_of(aids) => aid_of(aids) if aids else ImageAid(fill=0 * truth.tensors()['images'][0] + 0.5)
labels saved beside other images than they came with
    fedsim/contracts/target.py:Target.tensors_to_save [validity/test_road]
    align(answer, order, self.filling(true, aids)) => answer
a prior ranked above what sees
    fedsim/report/row.py:LeaderboardRow.standing [validity/test_leaderboard]
    drop float(not self.is_uninformed)
a prior marked strongest
    fedsim/report/leaderboard.py:_mark_strongest [validity/test_leaderboard]
    line.n_ok > 0 and (not line.is_uninformed) => line.n_ok > 0
a prior that lends the verdict its gain
    fedsim/report/judge.py:_verdict [validity/test_leaderboard]
    r.own_gain if strongest.is_uninformed else r.gain => r.gain
a trial exposed by two halves
    fedsim/report/leaderboard.py:_own_gains [validity/test_leaderboard]
    min(gain, over) => gain
a rare exact picture hidden by a steady attack
    fedsim/report/judge.py:_strongest [validity/test_leaderboard]
    never leaks
a single trial without a word on its control
    fedsim/report/leaderboard.py:_no_control [validity/test_leaderboard]
    not ok or any((row.other_update for row in ok)) => True
labels of any update as a leak
    fedsim/report/judge.py:_fits_any_update [validity/test_leaderboard]
    over.mean < told.leaks => False
memberships of any release as a leak
    fedsim/report/judge.py:_leaks_told [validity/test_leaderboard]
    not _fits_any_update(row, what) => True
memberships of any release as the control
    fedsim/report/judge.py:_does_no_better [validity/test_leaderboard]
    over_other is not None and over_other.certain <= 0 => False
a verdict that forgets among how many it chose
    fedsim/report/judge.py:_count_compared [validity/test_leaderboard]
    max(1, sum((row.n_ok > 0 and measure(row) is not None for row in rows))) => 1
the best of many by one trial
    fedsim/report/judge.py:_level_by_gains [validity/test_leaderboard]
    certain >= row.main.leaks and (several or gain.compared == 1) => certain >= row.main.leaks
a poor guess without a warning
    fedsim/scoring/guess.py:guess_problem [validity/test_leaderboard]
    public_per_image >= _NEEDED => True
features held against no guess
    fedsim/report/row.py:LeaderboardRow.guess_of [validity/test_leaderboard]
    self.baseline[name] => None
a field of results that no document describes
    fedsim/results/lines.py:ResultRow.dump [results/test_formats]
    exclude=beside => exclude=beside - {'folder'}
features guessed from nothing
    fedsim/targets/features.py:Features.guess [validity/test_road]
    public is None => True
a prior in the picture of what leaks
    fedsim/report/row.py:LeaderboardRow.standing [report/test_overview]
    float(not self.is_uninformed) => 0.0
a certificate is right from a cosine of 0.9
    fedsim/scoring/score.py [validity/test_beside_leakage]
    COSINE = 0.999 => COSINE = 0.9
a refusal ends as a failure does
    fedsim/cli/shared.py:_status [validity/test_beside_leakage]
    2 if isinstance(error, FedsimError) else None => 1 if isinstance(error, FedsimError) else None
a failure ends as a refusal does
    fedsim/cli/shared.py:_status [validity/test_beside_leakage]
    return 1 => return 2
a broken limit ends well
    fedsim/cli/commands.py:_judge [validity/test_beside_leakage]
    typer.Exit(1) => typer.Exit(0)
certificates of the best trial alone
    fedsim/report/leaderboard.py:_certificates.total [validity/test_beside_leakage]
    sum(known) => max(known)
failed trials count as ok
    fedsim/report/leaderboard.py:_aggregate [validity/test_beside_leakage]
    len(ok) => len(rows)
one start for all trials of a client
    fedsim/attacking/jobs.py:seed_of [validity/test_beside_leakage]
    drop observation.trial

# The server cannot reach clients' data.
a server that holds its clients' data
    fedsim/training/workload.py:Workload.server [training/test_workload]
    self.described => self.dataset

# A sum of masked vectors hides each of them.
a client gives up both secrets of another
    fedsim/federation/secure_aggregation/client.py:SumClient.agree
    [federation/secure_aggregation/test_refusals]
    drop in_sum & out
a model for one client alone is opened
    fedsim/federation/secure_aggregation/client.py:SumClient.agree
    [federation/secure_aggregation/test_refusals]
    not self._vouches(client, signatures) => client not in signatures
a server's own keys stand for a client's
    fedsim/federation/secure_aggregation/client.py:SumClient._check
    [federation/secure_aggregation/test_refusals]
    self._identity.vouches(client, statement, one.signature) => statement
a stage is answered twice
    fedsim/federation/secure_aggregation/client.py:SumClient._stage
    [federation/secure_aggregation/test_refusals]
    self.memory.done != at => self.memory.done > at + 1
few clients share masks with some of the others
    fedsim/federation/secure_aggregation/terms.py:Terms.neighbours
    [federation/secure_aggregation/test_dropouts]
    self.complete => 2 * reach >= len(everyone)
a wrong seed takes off another mask
    fedsim/federation/secure_aggregation/server.py:SumServer.reveal
    [federation/secure_aggregation/test_refusals]
    not hmac.compare_digest(secrets.commit(seed, session), self._directory[client].commitment)
    => False and (not hmac.compare_digest(secrets.commit(seed, session),
        self._directory[client].commitment))
rounding makes an update longer than its noise covers
    fedsim/federation/secure_aggregation/plan.py:_round_vector
    [federation/secure_aggregation/test_fixed_point]
    math.isinf => math.isfinite
noise of those who drop out is counted on
    fedsim/contracts/defense.py:SumTerms.client_noise
    [federation/secure_aggregation/test_fixed_point]
    participants * (self.threshold - self.colluding) => participants
rounding goes one way
    fedsim/federation/secure_aggregation/plan.py:_round_vector
    [federation/secure_aggregation/test_fixed_point]
    part + rng.uniform((len(part),), stream).numpy() => part
a client that adds up in secret also answers in the open
    fedsim/federation/client_app.py:_FederationClient._respond [federation/test_federation_secure]
    self.workload.protocol => not self.workload
a round is opened for two sets of clients
    fedsim/federation/client_app.py:_SumAnswers.agree
    [federation/test_federation_secure]
    partial(state.open_sum, sum.round, signatures) => partial(state.open_sum, sum.round, {})
clients that are told of different sums open one of fewer
    fedsim/federation/secure_aggregation/client.py:SumClient.unmask
    [federation/secure_aggregation/test_refusals]
    agreed < self._terms.quorum => agreed < 1
a sum counts a client whose shares were withheld
    fedsim/federation/secure_aggregation/client.py:SumClient.agree
    [federation/secure_aggregation/test_refusals]
    in_sum & set(self._neighbours(self._directory())) <= held => in_sum
clients of different scenarios are in one sum
    fedsim/federation/secure_aggregation/plan.py:terms [federation/test_federation_secure]
    [fingerprint(server.scenario, server.stack_name), list(server.census.held)]
    => [server.scenario.seed]
masks of one session serve another
    fedsim/federation/secure_aggregation/secrets.py:agree_key
    [federation/secure_aggregation/test_secrecy]
    b'fedsim secure aggregation\x00' + who + purpose.encode() + b'\x00' + session
    => b'fedsim secure aggregation\x00' + who + purpose.encode() + b'\x00'
""")
"""Claims that a review refuted and, below each, what is wrong then, and the change for it."""
