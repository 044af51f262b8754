import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.common.settings import CHECKPOINTS
from experiments.common.tasks import line_retrieval, line_tokenizer
from experiments.training import answer_loss, induction, lines, running
from kvjax_models import checkpoint, llama

TINY = lines.PRESETS["tiny"]
PLAN = lines.Curriculum(longest_lines=6, final_steps=10, most_steps=1000, warmup_steps=4)
LAST = len(PLAN.lines) - 1


def test_stages_double_up_to_the_longest():
    assert PLAN.lines == (2, 4, 6)
    assert dataclasses.replace(PLAN, longest_lines=8).lines == (2, 4, 8)


def test_presets_fit_their_tokenizer_and_their_longest_records():
    vocabulary = line_tokenizer.build().get_vocab_size()
    for preset in lines.PRESETS.values():
        assert (preset.model.vocab_size, preset.model.max_length) == (vocabulary, lines.shapes(preset)[-1].tokens)


def test_a_stage_ends_once_smoothed_accuracy_passes_the_threshold():
    progress = lines.Progress()
    for _ in range(21):  # 1 - 0.9**22 is the first above 0.9
        progress = lines.after_step(PLAN, progress, 1.0)
    assert (progress.stage, progress.stage_steps) == (0, 21)
    progress = lines.after_step(PLAN, progress, 1.0)
    assert (progress.stage, progress.stage_steps, progress.accuracy) == (1, 0, 0.0)
    for _ in range(100):
        progress = lines.after_step(PLAN, progress, 0.9)
    assert progress.stage == 1


def test_rehearsals_count_for_no_stage_and_the_last_stage_is_never_left():
    almost = lines.Progress(accuracy=0.899)
    assert lines.after_step(PLAN, almost, None).stage == 0
    last = lines.Progress(stage=LAST, accuracy=0.99)
    assert lines.after_step(PLAN, last, 1.0).stage == LAST


def test_learning_rate_warms_up_and_falls_to_zero_in_the_last_stage():
    rates = [lines.learning_rate(PLAN, lines.Progress(step=step)) for step in range(6)]
    np.testing.assert_allclose(np.array(rates) / PLAN.learning_rate, [0.25, 0.5, 0.75, 1, 1, 1])
    last = lines.Progress(step=50, stage=LAST, stage_steps=PLAN.final_steps)
    assert lines.learning_rate(PLAN, last) == pytest.approx(0)
    assert lines.finished(PLAN, last)


def test_the_shipped_run_went_as_its_preset_says():
    preset, progress = lines.PRESETS["cpu"], lines.Progress()
    for line in (CHECKPOINTS / preset.name / "train_log.jsonl").open():
        logged = json.loads(line)
        assert not lines.finished(preset.curriculum, progress)
        assert lines.learning_rate(preset.curriculum, progress) == pytest.approx(logged["learning_rate"], abs=1e-7)
        assert logged["rehearsal"] or preset.curriculum.lines[progress.stage] == logged["lines"]
        accuracy = None if logged["rehearsal"] else logged["accuracy"]
        progress = lines.after_step(preset.curriculum, dataclasses.replace(progress, step=logged["step"] + 1), accuracy)
    assert lines.finished(preset.curriculum, progress)


def with_model(preset, **changes):
    """A preset with another model."""
    return dataclasses.replace(preset, model=dataclasses.replace(preset.model, **changes))


@pytest.fixture(scope="module")
def model() -> llama.Llama:
    return lines.initial_model(with_model(TINY, vocab_size=64), seed=0)


def test_answer_hidden_is_the_models_hidden_at_those_positions(model, monkeypatch):
    monkeypatch.setattr(answer_loss, "ATTENTION_BLOCK", 5)
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, 64)
    positions = jnp.array([[0, 4, 12], [5, 11, 6]])
    want = jnp.take_along_axis(jax.jit(model.hidden)(tokens), positions[:, :, None], axis=1)
    found = jax.jit(lambda tokens: answer_loss.answer_hidden(model, tokens, positions))(tokens)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_a_question_is_right_when_all_of_its_answer_tokens_are():
    conversations = [
        line_tokenizer.Conversation(np.array([1, 2, 5, 6, 1, 1, 7, 8]), np.array([0, 0, 1, 1, 0, 0, 1, 1], bool)),
        line_tokenizer.Conversation(np.array([1, 2, 5, 6]), np.array([0, 0, 1, 1], bool)),
    ]
    batch = answer_loss.make_batch(conversations, tokens=8, answer_tokens=6, eos=0)
    np.testing.assert_array_equal(batch.positions[0, :4], [1, 2, 5, 6])
    predicted = jnp.array([[5, 6, 7, 9, 3, 3], [5, 6, 3, 3, 3, 3]])
    right, asked = answer_loss.right_answers(jax.nn.one_hot(predicted, 10), batch, questions=3)
    np.testing.assert_array_equal(right, [[True, False, False], [True, False, False]])
    np.testing.assert_array_equal(asked, [[True, True, False], [True, False, False]])


def test_batches_fit_their_shape_and_hold_only_their_own_answers():
    encoder = line_tokenizer.LineEncoder(line_tokenizer.build())
    for shape in lines.shapes(lines.PRESETS["cpu"])[:4]:
        batch = lines.training_batch(encoder, shape, np.random.default_rng(0))
        assert batch.tokens.shape == (shape.rows, shape.tokens)
        found = np.take_along_axis(batch.tokens, batch.positions + 1, axis=1)
        np.testing.assert_array_equal(found[batch.used], batch.targets[batch.used])
        assert batch.question.max() < shape.questions


@pytest.mark.parametrize(("layers", "head_dim", "message"), [(3, 64, "2 layers"), (2, 32, "must be width=128")])
def test_induction_start_refuses_shapes_it_has_no_start_for(layers, head_dim, message):
    preset = with_model(lines.PRESETS["cpu"], layers=layers, head_dim=head_dim, vocab_size=64)
    with pytest.raises(ValueError, match=message):
        lines.initial_model(preset, seed=0)


def test_induction_start_fits_the_large_preset():
    lines.initial_model(with_model(lines.PRESETS["h200"], vocab_size=64), seed=0)


def test_heads_start_out_looking_back():
    config = with_model(lines.PRESETS["cpu"], vocab_size=256).model
    model = llama.Llama(config, rngs=nnx.Rngs(0))
    induction.start_with_induction(model, np.random.default_rng(0))
    tokens = jax.random.randint(jax.random.key(1), (1, 40), 0, 256)
    cos, sin = model.rotation(jnp.arange(40)[None])
    query, key, _ = model.layers[0].project(model.embed(tokens), cos, sin)
    key = jnp.repeat(key, config.query_heads // config.kv_heads, axis=2)
    scores = jnp.einsum("bqhd,bkhd->hqk", query, key)[:, 10:]
    attended = jnp.argmax(jnp.where(jnp.arange(40) <= jnp.arange(10, 40)[:, None], scores, -jnp.inf), axis=-1)
    distances = jnp.arange(10, 40) - attended
    for head, offset in enumerate(induction.OFFSETS):
        assert jnp.mean(distances[head] == offset) > 0.7


def test_with_the_induction_start_questions_prefer_the_right_line():
    tokenizer = line_tokenizer.build()
    encoder = line_tokenizer.LineEncoder(tokenizer)
    model = lines.initial_model(lines.PRESETS["cpu"], seed=0)
    drawn = line_retrieval.draw_lines(np.random.default_rng(5), 16)
    drawn = dataclasses.replace(drawn, numbers=np.arange(10_000, 26_000, 1000))  # two tokens each
    tokens = encoder.conversation(drawn, np.arange(16)).tokens[None]
    record = line_tokenizer.TOKENS_OF_HEADER + line_tokenizer.TOKENS_PER_LINE * 16
    numbers = np.arange(line_tokenizer.TOKENS_OF_HEADER + 4, record, line_tokenizer.TOKENS_PER_LINE)
    questions = np.arange(record + 3, tokens.shape[1], line_tokenizer.TOKENS_PER_QUESTION)

    cos, sin = model.rotation(jnp.arange(tokens.shape[1])[None])
    first, second = model.layers
    x = model.embed(tokens)
    x = first.finish(x, answer_loss.causal_attention(*first.project(x, cos, sin)))
    query, key, _ = second.project(x, cos, sin)
    key = jnp.repeat(key, 2, axis=2)
    scores = np.asarray(jnp.einsum("qhd,khd->qk", query[0, questions], key[0, numbers]))
    others = scores[~np.eye(16, dtype=bool)]
    assert scores.diagonal().mean() > others.mean() + 0.5 * others.std()  # 16 questions: two standard errors


def test_a_resumed_run_ends_with_the_parameters_of_one_that_was_never_killed(tmp_path, monkeypatch):
    whole, killed = (running.Settings("tiny", tmp_path / name) for name in ("whole", "killed"))
    want = lines.train(TINY, whole)

    # Killed after step 5, whose newest checkpoint is that of step 4.
    step, calls = lines.train_step, []

    def killing(*args):
        calls.append(args)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(lines, "train_step", killing)
    with pytest.raises(KeyboardInterrupt):
        lines.train(TINY, killed)
    monkeypatch.setattr(lines, "train_step", step)
    with pytest.raises(ValueError, match="--resume"):
        lines.train(TINY, killed)
    resumed = lines.train(TINY, dataclasses.replace(killed, resume=True))

    jax.tree.map(np.testing.assert_array_equal, nnx.state(want), nnx.state(resumed))
    logs = [[json.loads(line) for line in (one.output_dir / "train_log.jsonl").open()] for one in (whole, killed)]
    assert [row["step"] for row in logs[1]] == list(range(TINY.curriculum.most_steps))
    assert [row["loss"] for row in logs[0]] == [row["loss"] for row in logs[1]]


@pytest.mark.heavy
def test_a_finished_run_is_a_directory_that_loads(tmp_path):
    command = [sys.executable, "-m", "experiments.training.lines", "--preset=tiny", f"--output_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert checkpoint.load(tmp_path / "tiny").config == TINY.model
    [row] = json.loads((tmp_path / "tiny" / "accuracy.json").read_text())
    assert (row["context_tokens"], row["n"]) == (32, lines.EVALUATION_DOCUMENTS) and 0 <= row["value"] < 0.5
