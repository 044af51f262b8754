"""Generations that are saved, killed and taken up again, and prefixes that are read once."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models.generation import saved_states
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.rows import extend_rows
from kvjax_models.generation.sampling import Sampling
from kvjax_models.generation.saved_states import SavedStates
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

CONFIG = LlamaConfig(
    vocab_size=32, width=16, mlp_width=16, layers=2, query_heads=2, kv_heads=1, head_dim=8, max_length=128
)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [3, 1, 4, 1, 5]]
POLICIES = {
    "exact": lambda: kvjax.Exact(compact_every=4),
    "uniform": lambda: kvjax.Uniform(budget=8, sinks=1, recent=1, compact_every=4),
    "more_sinks": lambda: kvjax.Uniform(budget=8, sinks=2, recent=0, compact_every=4),
    "clusterkv": lambda: kvjax.ClusterKV(budget=8, sinks=1, compact_every=4),
    "host_memory": lambda: kvjax.HostMemory(kvjax.ClusterKV(budget=8, sinks=1, compact_every=4)),
}


def make_model(seed=0, config=CONFIG):
    return Llama(config, rngs=nnx.Rngs(seed))


def make_generator(policy="uniform", model=None, **changes):
    sizes = {"batch": 2, "max_prompt_tokens": 12, "max_new_tokens": 24, **changes}
    sampling = Sampling(temperature=1.0)
    return Generator(model or make_model(), POLICIES[policy](), **sizes, sampling=sampling)


def written(generator, state, tokens):
    """The state after so many tokens, and the tokens."""
    rows = [[] for _ in range(generator.batch)]
    for newest, new in generator.decode(state, tokens):
        state = newest
        extend_rows(rows, new)
    return state, rows


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(one, marks=pytest.mark.heavy) if one in ("exact", "clusterkv", "more_sinks") else one
        for one in POLICIES
    ],
)
def test_a_restored_generation_writes_what_an_uninterrupted_one_does(policy, tmp_path):
    generator = make_generator(policy)
    state = generator.prefill(generator.init_state(7), PROMPTS)
    state, first = written(generator, state, 8)
    SavedStates(tmp_path).save(8, generator, state, {"seed": 7}, {"tokens": first})
    _, rest = written(generator, state, 12)

    again = make_generator(policy)
    step, restored, notes = SavedStates(tmp_path).restore(again, {"seed": 7})
    assert (step, notes) == (8, {"tokens": first})
    fresh = jax.tree.leaves(again.init_state())
    assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in fresh]
    assert written(again, restored, 12)[1] == rest


def test_parameters_are_saved_once_and_restored_where_the_model_has_its_own(tmp_path):
    generator = make_generator(model=make_model(3))
    saved = SavedStates(tmp_path)
    for step in range(4):
        saved.save(step, generator, generator.init_state())
    restored = saved.restore_parameters(nnx.eval_shape(lambda: make_model()))
    jax.tree.map(np.testing.assert_array_equal, restored, generator.model)
    assert sorted(path.name for path in (tmp_path / "states").glob("[!.]*")) == ["2", "3"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda: make_generator("exact"), r"policy is {'class': 'Uniform'.*not {'class': 'Exact'"),
        # Of equal shapes: only the description tells.
        (lambda: make_generator("more_sinks"), r"policy is {'sinks': 1, 'recent': 1}, not {'sinks': 2, 'recent': 0}"),
        (lambda: make_generator(model=make_model(1)), r"model is {'sha256': '\w+'}, not {'sha256': '\w+'}"),
        (lambda: make_generator(max_new_tokens=25), r"sizes is {'max_new_tokens': 24}, not {'max_new_tokens': 25}"),
    ],
)
def test_what_belongs_to_something_else_is_refused_by_name(change, message, tmp_path):
    generator = make_generator()
    SavedStates(tmp_path).save(0, generator, generator.init_state())
    with pytest.raises(ValueError, match=message):
        SavedStates(tmp_path).restore(change())


def test_another_run_and_another_format_are_refused(tmp_path, monkeypatch):
    generator = make_generator()
    SavedStates(tmp_path).save(0, generator, generator.init_state(), {"seed": 1, "prompt": "a"})
    with pytest.raises(ValueError, match=re.escape("run is {'seed': 1}, not {'seed': 2}")):
        SavedStates(tmp_path).restore(generator, {"seed": 2, "prompt": "a"})
    written = saved_states.FORMAT
    monkeypatch.setattr(saved_states, "FORMAT", written + 1)
    with pytest.raises(ValueError, match=f"format is {written}, not {written + 1}$"):
        SavedStates(tmp_path).restore(generator, {"seed": 1, "prompt": "a"})


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no saves"):
        SavedStates(tmp_path).restore(make_generator())
    with pytest.raises(FileNotFoundError, match="has no parameters"):
        SavedStates(tmp_path).restore_parameters(make_model())


# A process that saves every few tokens, and goes on from what it finds. Told to, it kills itself while it saves for the
# third time, when arrays are on disk and digests are not.
WRITES_ON = """
    import os, pathlib, signal, sys
    from tests.models import test_saved_states as own
    from kvjax_models import atomic_io

    sealed, seal = [], atomic_io.write_digests

    def killing(directory):
        if len(sealed) == 3:  # the parameters and two states
            os.kill(os.getpid(), signal.SIGKILL)
        sealed.append(seal(directory))

    directory, killed, tokens_in_all = sys.argv[1], sys.argv[2] == "killed", int(sys.argv[3])
    if killed:
        atomic_io.write_digests = killing
    generator = own.long_generator(tokens_in_all)
    saved = own.SavedStates(directory)
    if list(pathlib.Path(directory).glob("states/[0-9]*")):
        step, state, notes = saved.restore(generator)
        tokens = notes["tokens"]
    else:
        step, state, tokens = 0, generator.prefill(generator.init_state(7), own.PROMPTS), [[], []]
    print(step, flush=True)
    for state, new in generator.decode(state, tokens_in_all - step):
        own.extend_rows(tokens, new)
        saved.save(len(tokens[0]), generator, state, notes={"tokens": tokens})
        print(len(tokens[0]), flush=True)
"""


def writing_on(directory, tokens, killed=False):
    """That process, which prints where it begins, and every save."""
    how = "killed" if killed else "whole"
    command = [sys.executable, "-c", textwrap.dedent(WRITES_ON), str(directory), how, str(tokens)]
    root = pathlib.Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "models"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def long_generator(tokens):
    return make_generator(model=make_model(config=dataclasses.replace(CONFIG, max_length=8192)), max_new_tokens=tokens)


def uninterrupted(tokens):
    generator = long_generator(tokens)
    return written(generator, generator.prefill(generator.init_state(7), PROMPTS), tokens)[1]


def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_save_before(tmp_path):
    killed = writing_on(tmp_path, 24, killed=True)
    said = killed.communicate()[1]
    assert killed.returncode == -signal.SIGKILL, said[-2000:]
    generator = long_generator(24)
    step, state, notes = SavedStates(tmp_path).restore(generator)
    assert step == 8
    rest = written(generator, state, 16)[1]
    assert [before + after for before, after in zip(notes["tokens"], rest, strict=True)] == uninterrupted(24)


@pytest.mark.heavy
@pytest.mark.parametrize("kills", [5, 50])
def test_a_generation_that_is_killed_many_times_writes_what_an_uninterrupted_one_does(kills, tmp_path):
    """At random times of its steps and its saves."""
    random, tokens, begun = np.random.default_rng(0), 40 * kills, []
    for number in range(kills + 1):
        process = writing_on(tmp_path, tokens)
        begun.append(int(process.stdout.readline() or -1))
        if number == kills:
            said = process.communicate()[1]
            assert process.returncode == 0, said[-2000:]
            break
        for _ in range(random.integers(4)):
            process.stdout.readline()
        time.sleep(random.uniform(0, 0.1))
        assert process.poll() is None, "it was done before its last kill"
        process.kill()
        process.communicate()
    assert begun == sorted(begun) and len(set(begun)) > kills / 5, begun
    _, _, notes = SavedStates(tmp_path).restore(long_generator(tokens))
    assert notes["tokens"] == uninterrupted(tokens)


@pytest.mark.parametrize("policy", ["uniform", pytest.param("host_memory", marks=pytest.mark.heavy)])
def test_sixteen_continuations_of_a_saved_prefix_are_those_of_runs_from_scratch(policy, tmp_path):
    model, prefix = make_model(), PROMPTS[0]
    questions = [[1 + row % 5, 2 + row, 3][: 1 + row % 3] for row in range(16)]
    sizes = {"batch": 1, "max_prompt_tokens": 12, "max_new_tokens": 16}
    alone = Generator(model, POLICIES[policy](), **sizes)
    SavedStates(tmp_path).save(0, alone, alone.prefill(alone.init_state(), [prefix]))

    state = SavedStates(tmp_path).restore(alone).state
    many = Generator(model, alone.policies, **{**sizes, "batch": 16})
    found = written(many, many.prefill(kvjax.repeat_rows(state, 16), questions), 9)[1]
    for question, tokens in zip(questions, found, strict=True):
        scratch = alone.prefill(alone.prefill(alone.init_state(), [prefix]), [question])
        assert written(alone, scratch, 9)[1] == [tokens]


def test_what_a_state_belongs_to_can_be_written_as_json():
    described = saved_states.describe_generator(make_generator())
    assert set(described) == {"model", "policy", "sizes", "arrays"}
    assert json.loads(json.dumps(described))["sizes"]["max_new_tokens"] == 24
