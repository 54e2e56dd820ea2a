"""The generative prior: zero at the truth, exact within the generator's range, and its file."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn

from fedsim import rng
from fedsim.attacking.knowledge import hand_over
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Grant
from fedsim.data.bundled import Faces
from fedsim.recording.files import read_tensors
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import FedsimError
from fedsim_attacks.gradient_matching.generative_prior import (
    GenerativePrior,
    Generator,
    _read_generator,
    fit_generator,
    pack_generator,
)

SHAPE = (1, 16, 16)
ROOT = Path(__file__).parents[3]


def example_generator(seed=0):
    """Random weights, the last enlarged so that it draws more than grey."""
    with rng.global_stream(seed):
        generator = Generator(SHAPE, latent=3, width=32)
    last = generator.rest[-2]
    assert isinstance(last, nn.Conv2d)
    last.weight.data *= 5
    return generator.requires_grad_(False)


def example_codes(count):
    return torch.randn(count, 3, generator=rng.generator(3, "codes"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "generator.safetensors"
    path.write_bytes(pack_generator(example_generator(), "public"))
    return path


def of_its_range(count):
    """An observation of images that `example_generator` draws, and those."""
    images = example_generator()(example_codes(count))
    observation, truth = make_observation(images, torch.arange(count), model="mlp")
    return *hand_over(observation, truth, Grant(labels="known")), images


def begin(attack, count):
    return attack.init(*of_its_range(count)[:2], rng.generator(0, "attack"))


def test_the_objective_is_zero_at_the_truth_alone(file):
    attack = GenerativePrior(weights=str(file), public="public", total_variation=0, iterations=9)
    state = begin(attack, 3)
    assert float(attack.step(state).loss) > 1e-2
    for stage in (0, 1):
        attack = attack.model_copy(update={"latent_iterations": 1 - stage})
        state = begin(attack, 3)
        state.codes.data.copy_(example_codes(3))
        state.best_codes.copy_(example_codes(3))
        assert -1e-6 < float(attack.step(state).loss) < 1e-6


def test_codes_are_searched_first_and_then_weights(file):
    """In the second stage every image has a generator of its own."""
    attack = GenerativePrior(
        weights=str(file), public="public", iterations=4, latent_iterations=2, learning_rate=0.1
    )
    state = begin(attack, 2)
    codes, fixed = state.codes.detach().clone(), example_generator().state_dict()
    for _ in range(2):
        state = attack.step(state)
    (generator,) = state.generators
    assert not torch.equal(state.codes, codes)
    assert all(torch.equal(fixed[name], value) for name, value in generator.state_dict().items())
    best = state.best_codes.clone()
    for _ in range(2):
        state = attack.step(state)
    assert torch.equal(state.codes, best)
    one, two = (each.first.weight for each in state.generators)
    assert not torch.equal(one, two)
    assert not torch.equal(one, fixed["first.weight"])


def test_an_untrained_generator_is_one_for_all_and_follows_signs():
    state = begin(GenerativePrior(iterations=9), 2)
    codes = state.codes.detach().clone()
    before = [weight.clone() for weight in state.generators[0].parameters()]
    (generator,) = GenerativePrior(iterations=9).step(state).generators
    assert torch.equal(state.codes, codes)
    # Adam's first step is as long as its rate wherever there is a slope, and shorter near 1e-8.
    for weight, old in zip(generator.parameters(), before, strict=True):
        moved = (weight - old).detach().abs()
        assert moved.any()
        assert float((moved * (moved - 0.001)).abs().max()) < 1e-9


def test_a_generator_is_trained_on_the_granted_images_alone():
    """Its error on them falls below that of their mean; nothing else is read or written."""
    public = Faces(size=16).load().test_images[:64].float() / 255
    errors = []
    fit_generator(
        public, width=16, iterations=60, seed=0, report=lambda _, loss: errors.append(float(loss))
    )
    assert errors[-1] < 0.8 * float((public - public.mean(0)).square().mean()) < errors[0]


def test_it_trains_before_it_searches_where_public_images_are_granted():
    attack = GenerativePrior(training_iterations=2, iterations=4, latent_iterations=2)
    observation, knowledge, _ = of_its_range(2)
    assert "public: test" in str(knowledge.grant.lacks(attack.required()))
    public = torch.zeros(20, *SHAPE, dtype=torch.uint8)
    grant = Grant(labels="known", public="test")
    granted = replace(knowledge, grant=grant, public_images=public)
    first, again, untrained = (
        each.init(observation, granted, rng.generator(0, "attack")).generators[0].state_dict()
        for each in (attack, attack, attack.model_copy(update={"training_iterations": 1}))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], untrained[name]) for name in first)
    state = attack.init(observation, granted, rng.generator(0, "attack"))
    for _ in range(4):
        state = attack.step(state)
    assert len(state.generators) == 2
    other = replace(granted, public_images=torch.zeros(20, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(AttackFailed, match="public images are of 3x32x32, the victim's of 1x16x16"):
        attack.init(observation, other, rng.generator(0, "attack"))


def test_files_that_do_not_fit_are_refused(file, tmp_path):
    def refused(path, message, shape=SHAPE):
        with pytest.raises(FedsimError, match=message):
            _read_generator(path, shape, "public")

    refused(tmp_path / "nowhere.safetensors", r"nowhere.*cannot be read")
    refused(file, "draws images of 1x16x16, the victim's are of 3x32x32; train", (3, 32, 32))
    other = tmp_path / "other.safetensors"
    other.write_bytes(pack_generator(example_generator(), "private"))
    refused(other, "trained on 'private', the attack declares 'public'; correct `public`")
    tensors = read_tensors(file)
    save_file(tensors, other)
    refused(other, r"not a generator; write one with benchmarks/train_generator\.py")
    other.write_bytes(file.read_bytes()[:-100])
    refused(other, "cannot be read as safetensors")
    header = {"generator": '{"shape":[1,16,16],"latent":3,"width":32,"public":"public"}'}
    save_file({**tensors, "first.bias": tensors["first.bias"][1:]}, other, header)
    refused(other, r"first\.bias is torch\.float32 \[511\]")
    save_file({**tensors, "first.bias": tensors["first.bias"] / 0}, other, header)
    refused(other, "not finite")


def test_parameters_that_do_not_go_together_are_refused():
    trained = {"weights": "a", "public": "b", "training_iterations": 5}
    short = {"iterations": 5, "latent_iterations": 6}
    for given in ({"weights": "a"}, {"public": "b"}, trained, short):
        with pytest.raises(ValidationError, match=r"both weights|exceed|trained already"):
            GenerativePrior.model_validate(given)


@pytest.mark.slow
def test_the_training_script_writes_what_an_attack_takes(tmp_path):
    """It prints the attack as a scenario names it."""
    path = tmp_path / "digits.safetensors"
    options = ["--set", "size=16", "--width", "16", "--iterations", "3"]
    script = ROOT / "benchmarks" / "train_generator.py"
    done = subprocess.run(
        [sys.executable, script, "digits", path, *options],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "3/3: mse" in done.stderr
    (attack,) = yaml.safe_load(f"[{done.stdout}]")
    assert attack.pop("name") == "generative_prior"
    assert attack["public"] == "digits size=16 test split, 359 images"
    images, labels = example_batch(1)
    seen = hand_over(*make_observation(images, labels), Grant(labels="known"))
    assert solve(GenerativePrior(**attack, iterations=11), *seen, seed=0).iterations == 11
