"""The language model's training: data of a step, the start, a run that is killed, and what is shipped."""

import dataclasses
import itertools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.common import sources
from experiments.common.tasks import line_tokenizer
from experiments.training import answer_loss, circuits, language_model, measuring, running
from experiments.training.language_presets import PRESETS, Stage
from kvjax_models import checkpoint, llama
from kvjax_models import tokenizer as tokenizers

TOKENS = 384
TINY = dataclasses.replace(PRESETS["tiny"], stages=(Stage(TOKENS, 1, 1, steps=5),))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The directory of a run that was killed after step 3, whose newest checkpoint is that of step 2."""
    directory = tmp_path_factory.mktemp("killed")
    step, calls = language_model.train_step, []

    def killing(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "train_step", killing)
        with pytest.raises(KeyboardInterrupt):
            language_model.train(TINY, running.Settings("tiny", directory))
    return directory


@pytest.fixture(scope="module")
def resumed(killed):
    """Model and tokenizer of that run once it went on."""
    return language_model.train(TINY, running.Settings("tiny", killed, resume=True))


def test_no_preset_is_trained_on_what_is_held_out():
    for preset in PRESETS.values():
        assert set(preset.packages) <= set(sources.packages(held_out=False))


def test_presets_are_as_long_and_as_small_as_they_claim():
    assert PRESETS["cpu"].model.max_length >= 2048 and PRESETS["h200"].model.max_length >= 8192
    for preset in PRESETS.values():
        assert preset.model.max_length == max(stage.tokens for stage in preset.stages)
    for name, most in (("cpu", 4), ("h200", 2)):
        model = jax.eval_shape(lambda name=name: nnx.state(abstract(PRESETS[name])))
        assert sum(leaf.size for leaf in jax.tree.leaves(model)) * most < 64e6


def abstract(preset):
    """A preset's model before its start, which works on real arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(circuits, "start_with_lookup", lambda model, rng: None)
        return language_model.initial_model(preset, seed=0)


def test_stages_follow_each_other():
    preset = PRESETS["cpu"]
    assert [preset.stage(step) for step in range(preset.steps)] == [
        stage for stage in preset.stages for _ in range(stage.steps)
    ]
    lengths = [preset.stage(step).tokens for step in range(preset.steps)]
    for begin, end in itertools.pairwise((0, *preset.restarts, preset.steps)):
        assert lengths[begin:end] == sorted(lengths[begin:end])
    with pytest.raises(ValueError, match=f"step={preset.steps} is past the last"):
        preset.stage(preset.steps)


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth():
    preset = dataclasses.replace(TINY, stages=(Stage(TOKENS, 1, 1, steps=6000),), warmup_steps=4)
    rates = language_model.learning_rate(preset)(np.array([0, 1, 2, 3, preset.steps]))
    np.testing.assert_allclose(rates / preset.learning_rate, [0.25, 0.5, 0.75, 1, 0.05], rtol=1e-3)


def test_a_restarted_learning_rate_does_the_same_again_at_half_the_rate():
    stages = (Stage(TOKENS, 1, 1, steps=6000),)
    preset = dataclasses.replace(TINY, stages=stages, warmup_steps=4, restarts=(3000,))
    rates = language_model.learning_rate(preset)(np.array([2999, 3000, 3003, 5999]))
    np.testing.assert_allclose(rates / preset.learning_rate, [0.05, 0.125, 0.5, 0.025], rtol=1e-3)


def test_the_data_of_a_step_follow_from_seed_and_step(killed):
    data = language_model.load_data(TINY, killed)
    (batch, tasks), (again, same), (other, _) = (
        language_model.training_batch(TINY, data, 0, step) for step in (3, 3, 4)
    )
    jax.tree.map(np.testing.assert_array_equal, batch, again)
    assert tasks == same and not jnp.array_equal(batch.natural, other.natural)
    text = "".join(map(sources.as_in_repository, sources.files("absl")))
    [window] = batch.natural.tolist()
    assert len(window) == TOKENS + 1 and data.tokenizer.decode(window).strip("\N{REPLACEMENT CHARACTER}") in text


def test_losses_of_a_text_are_those_of_the_model():
    model = start(TINY)
    tokens = jax.random.randint(jax.random.key(0), (2, 40), 0, TINY.model.vocab_size)
    logits, found = nnx.jit(lambda model: (model(tokens[:, :-1]), answer_loss.text_losses(model, tokens)))(model)
    want = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(tokens[:, 1:, None]), axis=-1)
    np.testing.assert_allclose(found, want[..., 0], rtol=1e-4, atol=1e-4)


def test_rows_of_many_and_of_few_answers_count_alike():
    model = start(TINY)
    answers = [(slice(5, 8), slice(12, 13)), (slice(9, 15),)]
    tokens = np.random.default_rng(0).integers(TINY.model.vocab_size, size=(2, 20), dtype=np.int32)
    is_answer = np.zeros(tokens.shape, bool)
    for row, places in enumerate(answers):
        for place in places:
            is_answer[row, place] = True
    batch = answer_loss.make_batch(list(map(line_tokenizer.Conversation, tokens, is_answer)), 20, 8, eos=0)
    loss, _, asked = nnx.jit(lambda model: answer_loss.rows_alike(model, batch, questions=4))(model)
    of_token = np.pad(nnx.jit(lambda model: answer_loss.text_losses(model, tokens))(model), ((0, 0), (1, 0)))
    want = [np.concatenate([of_token[row, place] for place in places]).mean() for row, places in enumerate(answers)]
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-4)
    assert asked.sum(axis=1).tolist() == [2, 1]


def test_a_step_weighs_answers_as_its_stage_says(killed, tmp_path, monkeypatch):
    data = language_model.load_data(TINY, killed)
    graph, params = nnx.split(start(TINY))
    one, other = (language_model.training_batch(TINY, data, seed, 0)[0] for seed in (0, 1))
    other = other._replace(natural=one.natural)

    def stepped(batch, weight):
        fresh = jax.tree.map(jnp.copy, params)  # a step's arguments are donated
        return language_model.train_step(graph, TINY, fresh, language_model.optimizer(TINY).init(fresh), batch, weight)[
            0
        ]

    def alike(weight):
        return jax.tree.leaves(jax.tree.map(jnp.array_equal, stepped(one, weight), stepped(other, weight)))

    assert all(alike(0.0)) and not any(alike(2.0))


def test_a_stage_says_how_much_answers_weigh(killed, monkeypatch):
    stages = (Stage(TOKENS, 1, 1, steps=1), Stage(TOKENS, 1, 1, steps=2, answer_weight=5.0))
    told = language_model.Step(0.0, 0.0, np.zeros((1, 1)), np.zeros((1, 1)))
    weights = []
    monkeypatch.setattr(
        language_model, "train_step", lambda graph, preset, *args: weights.append(args[-1]) or (*args[:2], told)
    )
    preset, data = dataclasses.replace(TINY, stages=stages), language_model.load_data(TINY, killed)
    training = language_model.Training(preset, 0, data, graph=None)
    for step in range(preset.steps):
        training.advance((None, None), running.Progress(step))
    assert weights == [1.0, 5.0, 5.0]


def test_weights_that_are_computed_again_change_no_gradient(monkeypatch):
    query, key, value = (jax.random.normal(jax.random.key(n), (1, 20, heads, 8)) for n, heads in enumerate((4, 2, 2)))

    def gradient():
        return jax.jit(jax.grad(lambda query: answer_loss.causal_attention(query, key, value).std()))(query)

    kept = gradient()
    monkeypatch.setattr(answer_loss, "RECOMPUTED_FROM", 20)
    np.testing.assert_allclose(gradient(), kept, rtol=1e-5, atol=1e-7)


def start(preset, **changes) -> llama.Llama:
    changed = dataclasses.replace(preset, model=dataclasses.replace(preset.model, **changes))
    return language_model.initial_model(changed, seed=0)


@nnx.jit
def attended(model, tokens):
    """Of every layer and query head the place that each token attends to most, `[layers, H_q, T]`, and the logits."""
    cos, sin = model.rotation(jnp.arange(tokens.shape[1])[None])
    x, found = model.embed(tokens), []
    for layer in model.layers:
        query, key, value = layer.project(x, cos, sin)
        heads = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
        scores = jnp.einsum("bqhd,bkhd->hqk", query, heads) / query.shape[-1] ** 0.5
        visible = jnp.arange(tokens.shape[1]) <= jnp.arange(tokens.shape[1])[:, None]
        found.append(jnp.argmax(jnp.where(visible, scores, -jnp.inf), axis=-1))
        x = layer.finish(x, answer_loss.causal_attention(query, key, value))
    return jnp.stack(found), model.logits(x)[0]


def test_a_fresh_model_looks_back_and_continues_what_repeats():
    model = start(PRESETS["cpu"], vocab_size=500, layers=3)
    once = np.random.default_rng(1).permutation(500)[:60]
    tokens = jnp.asarray(np.concatenate([once, once])[None])
    found, logits = map(np.asarray, attended(model, tokens))
    here = np.arange(10, 120)
    for head, offset in enumerate(circuits.NEAR_OFFSETS):
        assert np.mean(here - found[0, head, 10:] == offset) > 0.9
    # The second time, the first two heads of the next layer find what came next the first time.
    assert np.mean(found[1, :2, 64:119] == np.arange(64, 119) - 59) > 0.9
    assert np.mean(logits.argmax(axis=-1)[64:119] == tokens[0, 65:]) > 0.8


@pytest.mark.parametrize(("changes", "message"), [({"layers": 2}, "3 layers"), ({"width": 48}, "width=48 must be")])
def test_the_start_refuses_shapes_that_it_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        start(TINY, **changes)


def test_a_run_that_was_killed_needs_resume(killed):
    with pytest.raises(ValueError, match="--resume"):
        language_model.train(TINY, running.Settings("tiny", killed))


def test_a_resumed_run_ends_with_the_parameters_of_one_that_was_never_killed(killed, resumed, tmp_path):
    whole, _ = language_model.train(TINY, running.Settings("tiny", tmp_path))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(whole), nnx.state(resumed[0]))
    logs = [[json.loads(line) for line in (run / "train_log.jsonl").open()] for run in (tmp_path, killed)]
    assert [row["step"] for row in logs[1]] == list(range(TINY.steps))
    assert [row["natural_loss"] for row in logs[0]] == [row["natural_loss"] for row in logs[1]]
    assert all(asked > 0 for row in logs[1] for _, asked in row["answered"].values())


def test_what_is_shipped_is_measured_and_loads(killed, resumed, tmp_path):
    model, tokenizer = resumed
    rows = measuring.perplexities(model, tokenizer, TOKENS, windows=2, name="tiny")
    assert [row.extra["positions"] for row in rows] == [[0, 64], [64, 128], [128, 384]]
    # It has learnt next to nothing: near the perplexity of guessing, on both sides of it.
    assert all(TINY.model.vocab_size / 4 < row.value < TINY.model.vocab_size * 4 for row in rows)

    running.write(model, tokenizer.backend, tmp_path, killed / "train_log.jsonl")
    loaded, again = checkpoint.load(tmp_path), tokenizers.load(tmp_path)
    assert (again.prefix, again.eos_ids) == (tokenizer.prefix, tokenizer.eos_ids)
    tokens = jnp.asarray(again.encode("import absl\n"))[None]
    read = nnx.jit(lambda model: model(tokens))
    np.testing.assert_array_equal(read(loaded), read(model))


@pytest.mark.heavy
def test_a_finished_run_is_a_directory_with_a_card(tmp_path):
    command = [sys.executable, "-m", "experiments.training.language_model", "--preset=tiny", f"--output_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    directory = tmp_path / "tiny"
    checkpoint.load(directory)
    rows = json.loads((directory / "accuracy.json").read_text())
    of_tasks = {row["task"]: row for row in rows if row["metric"] == "accuracy"}
    assert set(of_tasks) == set(PRESETS["tiny"].tasks)
    assert all(0 <= row["ci95_low"] <= row["value"] <= row["ci95_high"] <= 1 for row in of_tasks.values())
    assert (directory / "training.png").stat().st_size > 3_000
    card = (directory / "README.md").read_text()
    for row in rows:
        assert f"| {row['value']:.3g} | {row['ci95_low']:.3g} to {row['ci95_high']:.3g} |" in card
