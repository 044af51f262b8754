"""Saves that are damaged, interrupted, written concurrently, or do not fit on the disk."""

import dataclasses
import random
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from experiments.common.rows import RowFile
from kvjax_models import atomic_io
from kvjax_models.fingerprint import model_fingerprint
from kvjax_models.generation.generator import Generator
from kvjax_models.model.llama import Llama
from kvjax_models.saves import DIGESTS, Saves
from tests.models.support import damage_bytes, limit_file_size, small_config, start_python

CONFIG = small_config()
SHAPES = {"a": jax.ShapeDtypeStruct((64,), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.int32)}


def make_model(seed=0, config=CONFIG, **options):
    return Llama(config, rngs=nnx.Rngs(seed), **options)


def make_arrays(step):
    return {"a": jnp.arange(64.0) * step, "b": jnp.array([step, 2, 3], jnp.int32)}


def save(saves, *steps):
    for step in steps:
        saves.save(step, make_arrays(step), {"format": 1}, {"step": step})


def assert_intact(saves, step):
    assert saves.notes(step) == {"step": step}
    jax.tree.map(np.testing.assert_array_equal, saves.restore(step, SHAPES), make_arrays(step))


def visible_names(directory):
    return sorted(path.name for path in directory.glob("[!.]*"))


def damage_file(path, rng):
    """Damages or removes a file; returns the kind of damage."""
    data = damaged = path.read_bytes()
    while damaged == data:  # zeros in place of zeros
        damaged, kind = damage_bytes(data, rng)
    path.write_bytes(damaged)
    if rng.random() < 0.1:
        path.unlink()
        return "remove"
    return kind


# --- Saves ---


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_damaged_saves_are_never_used(seed, tmp_path, caplog):
    """In 200 cases the older save is used and a warning names the damaged one."""
    rng = random.Random(seed)
    original, directory = tmp_path / "original", tmp_path / "damaged"
    save(Saves(original), 1, 2)
    for number in range(200):
        shutil.copytree(original, directory)
        path = rng.choice(sorted(path for path in (directory / "2").rglob("*") if path.is_file()))
        saves, case = Saves(directory), f"{damage_file(path, rng)} {path.name}"
        caplog.clear()
        assert saves.newest() == 1, (number, case)
        assert str(directory / "2") in caplog.text and "falling back to the save of step 1" in caplog.text, case
        if number % 50 == 0:
            assert_intact(saves, 1)
        shutil.rmtree(directory)


def test_errors_name_every_damaged_save(tmp_path):
    save(Saves(tmp_path), 1, 2)
    for step in (1, 2):
        (tmp_path / str(step) / "notes" / "metadata").write_text("{}")
    with pytest.raises(
        ValueError, match=r"all saves are damaged: .*2: notes/metadata is .*1: notes/metadata is damaged"
    ):
        Saves(tmp_path).newest()


def test_a_save_that_is_damaged_after_it_was_verified_is_found(tmp_path):
    saves = Saves(tmp_path)
    save(saves, 1, 2)
    assert saves.newest() == 2
    damage_file(tmp_path / "2" / "notes" / "metadata", random.Random(0))
    assert saves.newest() == 1


def test_notes_may_have_numbers_of_numpy(tmp_path):
    saves = Saves(tmp_path)
    saves.save(1, make_arrays(1), {"size": np.int64(3)}, {"score": np.float32(0.5), "tokens": np.arange(3)})
    assert saves.manifest(1) == {"size": 3} and saves.notes(1) == {"score": 0.5, "tokens": [0, 1, 2]}
    with pytest.raises(TypeError, match="set cannot be written as JSON"):
        saves.save(2, make_arrays(2), {}, {"tokens": {1, 2}})


def test_a_damaged_save_is_renamed_when_its_step_is_saved_again(tmp_path):
    save(Saves(tmp_path), 1, 2)
    damage_file(tmp_path / "2" / "notes" / "metadata", random.Random(0))
    saves = Saves(tmp_path)
    save(saves, 2)
    assert saves.newest() == 2 and (tmp_path / "damaged-2").is_dir()
    assert_intact(saves, 2)


@pytest.mark.parametrize("step", [3, 2])
def test_a_step_that_is_not_newer_is_refused(step, tmp_path):
    saves = Saves(tmp_path)
    save(saves, 3)
    with pytest.raises(ValueError, match=f"step {step} is not newer than the save of step 3"):
        save(saves, step)
    assert_intact(saves, 3)
    with pytest.raises(ValueError, match="already has saves of step 3; resume from them"):
        Saves(tmp_path).lock(require_empty=True)


@pytest.mark.parametrize("step", [-1, True, 16.0, "16", "../../out", None, np.float64(1)])
def test_invalid_steps(step, tmp_path):
    with pytest.raises(ValueError, match="step=.* must be an integer|step=-1 must be at least 0"):
        Saves(tmp_path).save(step, {"x": np.zeros(2)}, {}, {})
    assert not list(tmp_path.iterdir())


def test_sizes_may_be_numpy_integers():
    policy = kvjax.Uniform(np.int64(24), np.int64(4), np.int64(8), np.int64(4))
    sizes = {"batch": np.int64(1), "max_prompt_tokens": np.int64(16), "max_new_tokens": np.int64(8)}
    state = Generator(make_model(), policy, **sizes).init_state()
    plain = Generator(make_model(), kvjax.Uniform(24, 4, 8, 4), batch=1, max_prompt_tokens=16, max_new_tokens=8)
    assert jax.tree.structure(state) == jax.tree.structure(plain.init_state())


def test_deeply_nested_digests_are_damage(tmp_path, caplog):
    save(Saves(tmp_path), 1, 2)
    (tmp_path / "2" / DIGESTS).write_text("[" * 200_000)
    assert Saves(tmp_path).newest() == 1 and "digests.json or another file cannot be read" in caplog.text


def test_a_renamed_save_is_damaged(tmp_path, caplog):
    save(Saves(tmp_path), 1, 2)
    (tmp_path / "2").rename(tmp_path / "7")
    assert Saves(tmp_path).steps() == [1, 7] and Saves(tmp_path).newest() == 1
    assert "7: the directory was renamed: it holds the save of step 2" in caplog.text


SAVE_FOREVER = """
    import sys
    from kvjax_models.saves import Saves
    from tests.trust import test_saves
    saves = Saves(sys.argv[1])
    first = saves.newest() + 1 if saves.steps() else 1
    for step in range(first, 10**6):
        test_saves.save(saves, step)
        print(step, flush=True)
"""


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path):
    writer = start_python(SAVE_FOREVER, tmp_path)
    try:
        assert writer.stdout.readline() == "1\n", writer.stderr.read()[-2000:]
        with pytest.raises(OSError, match=r"another process is writing to .* \(it holds \.lock\); wait for it"):
            save(Saves(tmp_path), 10**7)
    finally:
        writer.kill()
        writer.communicate()
    save(Saves(tmp_path), 10**7)
    assert_intact(Saves(tmp_path), 10**7)


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.heavy)])
def test_a_killed_writer_leaves_an_intact_save(kills, tmp_path):
    rng, last = random.Random(kills), 0
    for _ in range(kills):
        writer = start_python(SAVE_FOREVER, tmp_path)
        assert int(writer.stdout.readline()) > last, writer.stderr.read()[-2000:]
        time.sleep(rng.uniform(0.0, 0.4))
        writer.send_signal(signal.SIGKILL)
        reported = writer.communicate()[0].split()
        saves = Saves(tmp_path)
        assert saves.newest() >= int(reported[-1] if reported else last)
        last = saves.newest()
        assert_intact(saves, last)


def test_a_full_disk_preserves_the_previous_save(tmp_path, monkeypatch):
    saves = Saves(tmp_path)
    save(saves, 1)
    large = {"a": jax.random.normal(jax.random.key(0), (10_000,))}
    with pytest.raises(OSError, match="step 2 could not be saved to .*") as error, limit_file_size(2000):
        saves.save(2, large, {"format": 1}, {})
    assert "\n" not in str(error.value)
    assert visible_names(tmp_path) == ["1"]

    def fail(path, text):
        raise OSError("no space for digests")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="step 2 could not be saved to .*: no space"):
        patch.setattr(atomic_io, "write_text", fail)
        save(saves, 2)
    assert visible_names(tmp_path) == ["1"]
    assert_intact(Saves(tmp_path), 1)
    save(saves, 2)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: save(Saves(path), 1),
        lambda path: RowFile(path / "rows.jsonl"),
    ],
    ids=["save", "rows"],
)
def test_errors_name_a_path_that_is_not_writable(write, tmp_path):
    (tmp_path / "file").write_text("")  # in place of a directory
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        write(tmp_path / "file" / "directory")


# --- Fingerprints and single files ---


@pytest.mark.parametrize("factor", [-1.0, 2.0])
def test_fingerprints_of_scaled_tensors_differ(factor):
    model, expected = make_model(), model_fingerprint(make_model())
    kernel = model.layers[0].mlp.gate_up.kernel
    assert model_fingerprint(model) == expected
    kernel[...] = factor * kernel[...]
    assert model_fingerprint(model) != expected  # not cached
    kernel[...] = kernel[...] / factor
    assert model_fingerprint(model) == expected


def test_fingerprints_depend_on_configuration_and_dtype():
    other_config = dataclasses.replace(CONFIG, rope_theta=5e5)
    models = [make_model(), make_model(config=other_config), make_model(1), make_model(dtype=jnp.bfloat16)]
    assert len(set(map(model_fingerprint, models))) == 4


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    atomic_io.write_text(path, "before")
    with pytest.raises(OSError), limit_file_size(2000):
        atomic_io.write_text(path, "x" * 5000)
    assert path.read_text() == "before" and [entry.name for entry in tmp_path.iterdir()] == ["file"]
