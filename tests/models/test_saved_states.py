"""Saved states: resumed and killed runs, and refusals."""

import signal

import jax
import pytest
from flax import nnx

import kvjax
from kvjax_models.generation import saved_states
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.sampling import Sampling
from kvjax_models.generation.saved_states import SavedStates
from kvjax_models.model.llama import Llama
from tests.kvjax.support import each
from tests.models.support import small_config, start_python

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [3, 1, 4, 1, 5]]
POLICIES = {
    "exact": lambda: kvjax.Exact(compact_every=4),
    "uniform": lambda: kvjax.Uniform(budget=8, sinks=1, recent=1, compact_every=4),
    "attention_matching": lambda: kvjax.AttentionMatching(budget=8, sinks=1, compact_every=4),
    "more_sinks": lambda: kvjax.Uniform(budget=8, sinks=2, recent=0, compact_every=4),
    "clusterkv": lambda: kvjax.ClusterKV(budget=8, sinks=1, compact_every=4),
    "host_memory": lambda: kvjax.HostMemory(kvjax.ClusterKV(budget=8, sinks=1, compact_every=4)),
}


def make_model(seed=0, **changes):
    return Llama(small_config(layers=2, **changes), rngs=nnx.Rngs(seed))


def make_generator(policy="uniform", model=None, **changes):
    sizes = {"batch": 2, "max_prompt_tokens": 12, "max_new_tokens": 24, **changes}
    return Generator(model or make_model(), POLICIES[policy](), **sizes)


def start(generator, seed=0):
    """Returns a state whose tokens are sampled."""
    return generator.init_state(seed, Sampling(temperature=1.0))


@pytest.mark.parametrize("policy", each(POLICIES, quick=("uniform", "host_memory")))
def test_a_restored_generation_continues_like_an_uninterrupted_one(policy, tmp_path):
    generator = make_generator(policy)
    first, state = generator.decode_all(generator.prefill(start(generator, 7), PROMPTS), 8)
    SavedStates(tmp_path).save(8, generator, state, {"seed": 7}, {"tokens": first})
    remaining, _ = generator.decode_all(state, 12)

    generator = make_generator(policy)
    step, restored, notes = SavedStates(tmp_path).restore(generator, {"seed": 7})
    assert (step, notes) == (8, {"tokens": first})
    empty = jax.tree.leaves(generator.init_state())
    assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in empty]
    assert generator.decode_all(restored, 12)[0] == remaining


def test_states_are_saved_without_weights(tmp_path):
    generator = make_generator(model=make_model(3, vocab_size=20_000))
    for step in range(4):
        SavedStates(tmp_path).save(step, generator, generator.init_state())
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["2", "3"]
    assert (
        sum(path.stat().st_size for path in tmp_path.rglob("*")) < generator.model.embedding.embedding[...].nbytes / 2
    )


@pytest.mark.parametrize(
    "make_other, message",
    [
        (lambda: make_generator("exact"), r"policy\[0\].class is 'Uniform', not 'Exact'$"),
        # Arrays of equal shapes, so only the description differs.
        (lambda: make_generator("more_sinks"), r"policy\[0\].sinks is 1, not 2$"),
        (lambda: make_generator(model=make_model(1)), "model.weights differs$"),
        (lambda: make_generator(max_new_tokens=25), r"sizes.max_new_tokens is 24, not 25$"),
    ],
)
def test_states_of_another_generator_are_refused(make_other, message, tmp_path):
    generator = make_generator()
    SavedStates(tmp_path).save(0, generator, generator.init_state())
    with pytest.raises(ValueError, match=message):
        SavedStates(tmp_path).restore(make_other())


def test_states_of_another_run_or_format_are_refused(tmp_path, monkeypatch):
    generator = make_generator()
    SavedStates(tmp_path).save(0, generator, generator.init_state(), {"seed": 1, "prompt": "a"})
    with pytest.raises(ValueError, match="run.seed is 1, not 2$"):
        SavedStates(tmp_path).restore(generator, {"seed": 2, "prompt": "a"})
    current = saved_states.FORMAT
    monkeypatch.setattr(saved_states, "FORMAT", current + 1)
    with pytest.raises(ValueError, match=f"format is {current}, not {current + 1}$"):
        SavedStates(tmp_path).restore(generator, {"seed": 1, "prompt": "a"})


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no saved states"):
        SavedStates(tmp_path).restore(make_generator())


# A process that saves every few tokens and kills itself during its third save, when the arrays are on disk but their
# digests are not.
SAVING_PROCESS = """
    import os, signal, sys
    from tests.models import test_saved_states as tests
    from kvjax_models import saves

    write_digests = saves.Saves._write_digests

    def kill(self, step):
        if step == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        write_digests(self, step)

    saves.Saves._write_digests = kill
    generator, saved, tokens = tests.make_generator(), tests.SavedStates(sys.argv[1]), [[], []]
    for state, new in generator.decode(generator.prefill(tests.start(generator, 7), tests.PROMPTS), 24):
        for row, row_tokens in zip(tokens, new.tolist()):
            row.extend(row_tokens)
        saved.save(len(tokens[0]), generator, state, notes={"tokens": tokens})
"""


def test_a_run_that_is_killed_while_saving_resumes_from_the_previous_save(tmp_path):
    process = start_python(SAVING_PROCESS, tmp_path)
    stderr = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, stderr[-2000:]
    generator = make_generator()
    step, state, notes = SavedStates(tmp_path).restore(generator)
    assert step == 8
    remaining, _ = generator.decode_all(state, 16)
    uninterrupted, _ = generator.decode_all(generator.prefill(start(generator, 7), PROMPTS), 24)
    assert [before + after for before, after in zip(notes["tokens"], remaining, strict=True)] == uninterrupted
