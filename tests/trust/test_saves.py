"""Saves that are damaged, interrupted, written concurrently, or do not fit on the disk."""

import random
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax_models import atomic_io
from kvjax_models.fingerprint import model_fingerprint
from kvjax_models.model.llama import Llama
from kvjax_models.saves import DIGESTS, Save
from tests.models.support import damage_bytes, limit_file_size, small_config, start_python

SHAPES = {"a": jax.ShapeDtypeStruct((64,), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.int32)}


def make_model(seed=0, config=None, **options):
    return Llama(config or small_config(), rngs=nnx.Rngs(seed), **options)


def make_arrays(number):
    return {"a": jnp.arange(64.0) * number, "b": jnp.array([number, 2, 3], jnp.int32)}


def save(directory, number=1):
    Save(directory).write(make_arrays(number), {"format": 1}, {"number": number})


def assert_intact(directory, number=1):
    saved = Save(directory)
    saved.check()
    assert saved.notes == {"number": number}
    jax.tree.map(np.testing.assert_array_equal, saved.restore(SHAPES), make_arrays(number))


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


def test_a_damaged_save_is_never_used(tmp_path):
    rng, original, directory = random.Random(0), tmp_path / "original", tmp_path / "damaged"
    save(original)
    for number in range(100):
        shutil.copytree(original, directory)
        path = rng.choice(sorted(path for path in (directory / "0").rglob("*") if path.is_file()))
        case = f"{number}: {damage_file(path, rng)} {path.name}"
        with pytest.raises(ValueError, match=f"the document in {directory} is damaged"):
            Save(directory).check()
            pytest.fail(case)
        shutil.rmtree(directory)
    with pytest.raises(ValueError, match="already has a saved document; open it"):
        save(original, 2)
    assert_intact(original)
    (original / "0" / DIGESTS).write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"digests.json or another file cannot be read"):
        Save(original).check()


def test_notes_may_have_numbers_of_numpy(tmp_path):
    saved = Save(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no saved document"):
        saved.check()
    with pytest.raises(TypeError, match="set cannot be written as JSON"):
        saved.write(make_arrays(2), {}, {"tokens": {1, 2}})
    saved.write(make_arrays(1), {"size": np.int64(3)}, {"score": np.float32(0.5), "tokens": np.arange(3)})
    assert saved.manifest == {"size": 3} and saved.notes == {"score": 0.5, "tokens": [0, 1, 2]}


# Is killed when the arrays are on disk but their digests are not, or holds the lock.
SAVING_PROCESS = """
    import os, signal, sys, time
    from kvjax_models.saves import Save
    from tests.trust import test_saves

    if sys.argv[2] == "killed":
        Save._write_digests = lambda self: os.kill(os.getpid(), signal.SIGKILL)
        test_saves.save(sys.argv[1])
    writer = Save(sys.argv[1])
    writer.lock()
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_save_that_is_killed_is_replaced(tmp_path):
    process = start_python(SAVING_PROCESS, tmp_path, "killed")
    stderr = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, stderr[-2000:]
    with pytest.raises(ValueError, match=f"{DIGESTS} is missing"):
        Save(tmp_path).check()
    save(tmp_path, 2)
    assert_intact(tmp_path, 2)


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path):
    writer = start_python(SAVING_PROCESS, tmp_path, "lock")
    try:
        assert writer.stdout.readline() == "locked\n", writer.stderr.read()[-2000:]
        with pytest.raises(OSError, match=r"another process is writing to .* \(it holds \.lock\); wait for it"):
            save(tmp_path)
    finally:
        writer.kill()
        writer.communicate()
    save(tmp_path)
    assert_intact(tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    large = {"a": jax.random.normal(jax.random.key(0), (10_000,))}
    with pytest.raises(OSError, match="the document could not be saved to .*") as error, limit_file_size(2000):
        Save(tmp_path).write(large, {"format": 1}, {})
    assert "\n" not in str(error.value)
    assert visible_names(tmp_path) == []

    def fail(path, text):
        raise OSError("no space for digests")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="could not be saved to .*: no space"):
        patch.setattr(atomic_io, "write_text", fail)
        save(tmp_path)
    assert visible_names(tmp_path) == []
    save(tmp_path)
    assert_intact(tmp_path)


def test_errors_name_a_path_that_is_not_writable(tmp_path):
    (tmp_path / "file").write_text("")  # in place of a directory
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        save(tmp_path / "file" / "directory")


# --- Fingerprints and single files ---


def test_fingerprints_depend_on_weights_configuration_and_dtype():
    model, expected = make_model(), model_fingerprint(make_model())
    kernel = model.layers[0].mlp.gate_up.kernel
    for factor in (-1.0, 2.0):
        assert model_fingerprint(model) == expected
        kernel[...] = factor * kernel[...]
        assert model_fingerprint(model) != expected  # not cached
        kernel[...] = kernel[...] / factor
    others = [make_model(config=small_config(**{"rope.theta": 5e5})), make_model(1), make_model(dtype=jnp.bfloat16)]
    assert len({expected, *map(model_fingerprint, others)}) == 4


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    atomic_io.write_text(path, "before")
    with pytest.raises(OSError), limit_file_size(2000):
        atomic_io.write_text(path, "x" * 5000)
    assert path.read_text() == "before" and [entry.name for entry in tmp_path.iterdir()] == ["file"]
