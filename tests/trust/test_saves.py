"""Saves that are damaged, cut off, written twice or by two, or that find no room."""

import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models import atomic_io, fingerprint
from kvjax_models.formats import huggingface, replacing
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.numbered_saves import NumberedSaves
from kvjax_models.generation.saved_states import SavedStates
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

CONFIG = LlamaConfig(
    vocab_size=32, width=16, mlp_width=16, layers=1, query_heads=2, kv_heads=1, head_dim=8, max_length=128
)
LIKE = {"a": jax.ShapeDtypeStruct((64,), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.int32)}


def arrays(step):
    return {"a": jnp.arange(64.0) * step, "b": jnp.array([step, 2, 3], jnp.int32)}


def save(saves, *steps):
    for step in steps:
        saves.save(step, arrays(step), {"format": 1}, {"step": step})


def check(saves, step):
    """That a save is what was saved."""
    assert saves.notes(step) == {"step": step}
    jax.tree.map(np.testing.assert_array_equal, saves.arrays(step, LIKE), arrays(step))


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def spoil(path, rng):
    """Damages a file in one of the ways that files are; what it did."""
    data = bytearray(path.read_bytes())
    how = rng.choice(["flip", "flip", "flip", "cut", "longer", "gone", "empty", "another"])
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "longer":
        path.write_bytes(data + bytes([rng.randrange(256)]))
    elif how == "another":
        path.write_bytes(rng.randbytes(len(data)))
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    return f"{how} {path.name}"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_of_damaged_saves_none_is_taken_in_silence(seed, tmp_path, caplog):
    """Two hundred of them: the older save is taken, and the word names the damaged one."""
    rng = random.Random(seed)
    good = tmp_path / "good"
    save(NumberedSaves(good), 1, 2)
    for number in range(200):
        shutil.copytree(good, tmp_path / "bad")
        saves = NumberedSaves(tmp_path / "bad")
        did = spoil(rng.choice(files_of(tmp_path / "bad" / "2")), rng)
        caplog.clear()
        assert saves.newest() == 1, (number, did)
        assert str(tmp_path / "bad" / "2") in caplog.text and "falling back to the save of step 1" in caplog.text, did
        if number % 50 == 0:
            check(saves, 1)
        shutil.rmtree(tmp_path / "bad")


def test_where_no_save_is_whole_each_is_named(tmp_path):
    save(NumberedSaves(tmp_path), 1, 2)
    for step in (1, 2):
        (tmp_path / str(step) / "notes.json").write_text("{}")
    with pytest.raises(ValueError, match=r"all saves are damaged: .*2: notes.json is .*1: notes.json is damaged"):
        NumberedSaves(tmp_path).newest()


def test_a_damaged_save_is_set_aside_by_the_one_that_takes_its_place(tmp_path):
    save(NumberedSaves(tmp_path), 1, 2)
    spoil(tmp_path / "2" / "notes.json", random.Random(0))
    saves = NumberedSaves(tmp_path)
    save(saves, 2)
    check(saves, saves.newest())
    assert (tmp_path / "2.damaged").is_dir() and saves.newest() == 2


@pytest.mark.parametrize("step", [3, 2])
def test_a_step_that_is_not_newer_is_refused(step, tmp_path):
    saves = NumberedSaves(tmp_path)
    save(saves, 3)
    with pytest.raises(ValueError, match=f"step {step} is not newer than the save of step 3"):
        save(saves, step)
    check(saves, 3)
    with pytest.raises(ValueError, match="already has saves of step 3; resume from them"):
        NumberedSaves(tmp_path).lock(require_empty=True)


STEPS_OF_NO_SAVE = [-1, True, 16.0, "16", "../../out", None, np.float64(1)]


@pytest.mark.parametrize("step", STEPS_OF_NO_SAVE)
def test_steps_are_integers_from_zero(step, tmp_path):
    generator = Generator(model(), kvjax.Exact(), batch=1, max_prompt_tokens=8, max_new_tokens=8)
    saves = SavedStates(tmp_path / "run")
    with pytest.raises(ValueError, match="step=.* must be an integer|step=-1 must be at least 0"):
        saves.save(step, generator, generator.init_state())
    with pytest.raises(ValueError, match="step=.* must be an integer|step=-1 must be at least 0"):
        NumberedSaves(tmp_path / "saves").save(step, {}, {}, {})
    assert not list(tmp_path.iterdir())


def test_integers_of_numpy_save_and_restore(tmp_path):
    def generator(number):
        policy = kvjax.Uniform(number(24), number(4), number(8), number(4))
        return Generator(model(), policy, batch=number(1), max_prompt_tokens=number(16), max_new_tokens=number(8))

    one = generator(np.int64)
    SavedStates(tmp_path).save(np.int64(3), one, one.init_state())
    assert SavedStates(tmp_path).restore(generator(int)).step == 3


def test_a_renamed_save_is_not_taken_for_another_step(tmp_path, caplog):
    save(NumberedSaves(tmp_path), 1, 2)
    (tmp_path / "2").rename(tmp_path / "7")
    (tmp_path / "007").mkdir()
    assert NumberedSaves(tmp_path).steps() == [1, 7] and NumberedSaves(tmp_path).newest() == 1
    assert "7: the directory was renamed: it holds the save of step 2" in caplog.text


def test_many_saves_keep_the_newest_alone(tmp_path):
    saves = NumberedSaves(tmp_path, keep=3)
    save(saves, *range(7))
    assert saves.steps() == [4, 5, 6]
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["4", "5", "6"]


def python(code, *arguments, **others):
    """A process of its own, which prints a line when it is ready."""
    root = pathlib.Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "models"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        **others,
    )


WRITES_ON = """
    import pathlib, sys
    from kvjax_models.generation.numbered_saves import NumberedSaves
    from tests.trust import test_saves as own
    saves = NumberedSaves(pathlib.Path(sys.argv[1]))
    first = saves.newest() + 1 if saves.steps() else 1
    for step in range(first, 10**6):
        own.save(saves, step)
        print(step, flush=True)
"""


def test_a_second_writer_is_refused_until_the_first_is_dead(tmp_path):
    writer = python(WRITES_ON, tmp_path)
    try:
        assert writer.stdout.readline() == "1\n", writer.stderr.read()[-2000:]
        with pytest.raises(OSError, match=r"another process is writing to .* \(it holds \.lock\); wait for it"):
            save(NumberedSaves(tmp_path), 10**7)
    finally:
        writer.kill()
        writer.communicate()
    save(NumberedSaves(tmp_path), 10**7)  # a dead writer's lock is no one's
    check(NumberedSaves(tmp_path), 10**7)


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.heavy)])
def test_a_writer_that_is_killed_at_any_time_leaves_a_whole_save(kills, tmp_path):
    rng, last = random.Random(kills), 0
    for _ in range(kills):
        writer = python(WRITES_ON, tmp_path)
        assert int(writer.stdout.readline()) > last, writer.stderr.read()[-2000:]
        time.sleep(rng.uniform(0.0, 0.4))
        writer.send_signal(signal.SIGKILL)
        told = writer.communicate()[0].split()
        saves = NumberedSaves(tmp_path)
        assert saves.newest() >= int(told[-1] if told else last)
        last = saves.newest()
        check(saves, last)


def without_room(function):
    """What a function does on a small disk; every other file of this process is left alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        return function()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_save_before(tmp_path):
    saves = NumberedSaves(tmp_path)
    save(saves, 1)
    large = {"a": jax.random.normal(jax.random.key(0), (10_000,))}
    with pytest.raises(OSError, match="step 2 could not be saved to .*") as error:
        without_room(lambda: saves.save(2, large, {"format": 1}, {}))
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["1"]
    check(NumberedSaves(tmp_path), 1)
    save(saves, 2)


# A process that may read everything and write nothing, whoever runs the tests.
MAY_NOT_WRITE = """
    import os, pathlib, sys
    from kvjax_models.formats import huggingface
    from kvjax_models.generation.numbered_saves import NumberedSaves
    from experiments.common.resuming import Finished
    from tests.trust import test_saves as own
    directory = pathlib.Path(sys.argv[1])
    if os.geteuid() == 0:
        os.setuid(65534)
    for write in (
        lambda: own.save(NumberedSaves(directory / "saves"), 2),
        lambda: own.save(NumberedSaves(directory / "new"), 1),
        lambda: own.save(NumberedSaves(directory / "saves" / "1" / "digests.json"), 1),
        lambda: huggingface.save_model(directory / "model", own.model(1)),
        lambda: Finished(directory / "done.jsonl").add({}, 1),
    ):
        try:
            write()
        except OSError as error:
            print(error)
"""


@pytest.mark.skipif(os.name == "nt", reason="other rights")
def test_what_may_not_be_written_to_is_named_in_one_line_and_stays():
    with tempfile.TemporaryDirectory() as made:  # which others may read, as pytest's own may not be
        directory = pathlib.Path(made)
        save(NumberedSaves(directory / "saves"), 1)
        huggingface.save_model(directory / "model", model(0))
        paths = [directory, *directory.rglob("*")]
        for path in paths:
            path.chmod(0o555 if path.is_dir() else 0o444)
        said, problem = python(MAY_NOT_WRITE, directory).communicate()
        for path in paths:
            path.chmod(0o755)
        lines = said.splitlines()
        assert len(lines) == 5 and all(str(directory) in line for line in lines), (said, problem[-2000:])
        check(NumberedSaves(directory / "saves"), 1)
        assert same(huggingface.load_model(directory / "model"), model(0))


def model(seed=0, config=CONFIG):
    return Llama(config, rngs=nnx.Rngs(seed))


def same(one, other):
    return fingerprint.model_fingerprint(one) == fingerprint.model_fingerprint(other)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    huggingface.save_model(tmp_path, model(0))
    with pytest.raises(OSError, match="the model could not be saved"):
        without_room(lambda: huggingface.save_model(tmp_path, model(1)))
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["config.json", "model.safetensors"]
    assert not (tmp_path / replacing.PREVIOUS).exists() and same(huggingface.load_model(tmp_path), model(0))


OTHER = LlamaConfig(**{**vars(CONFIG), "rope_theta": 500.0, "mlp_width": 24})
STEPS = ((os, "link"), (pathlib.Path, "rename"), (pathlib.Path, "replace"), (pathlib.Path, "unlink"))
NUM_STEPS = 19  # the last one completes the save


def save_until(where, error, directory, monkeypatch, *, alive):
    """Saves another model; the step `where` on the disk fails, and unless the process stays alive all later ones."""
    huggingface.save_model(directory, model(0), max_shard_bytes=4000)
    calls = []

    def failing(function):
        def run(*arguments, **named):
            calls.append(function)
            if len(calls) == where or (len(calls) > where and not alive):
                raise error
            return function(*arguments, **named)

        return run

    with monkeypatch.context() as patch:
        for of, name in STEPS:
            patch.setattr(of, name, failing(getattr(of, name)))
        huggingface.save_model(directory, model(1, OTHER))
    return len(calls)


@pytest.mark.parametrize("where", range(1, NUM_STEPS + 1))
def test_a_checkpoint_is_saved_as_one_wherever_it_stops(where, tmp_path, monkeypatch):
    """A killed save leaves the old model or the new one, never parts of both, and the next save goes on from it."""
    with pytest.raises(KeyboardInterrupt):
        save_until(where, KeyboardInterrupt, tmp_path, monkeypatch, alive=False)
    found = huggingface.load_model(tmp_path)
    assert same(found, model(0)) if found.config == CONFIG else same(found, model(1, OTHER))
    huggingface.save_model(tmp_path, model(2))
    assert same(huggingface.load_model(tmp_path), model(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.json", "model.safetensors"]


@pytest.mark.parametrize("where", [*range(1, NUM_STEPS + 1), 10**6])
def test_a_save_that_fails_leaves_the_old_model_for_every_reader(where, tmp_path, monkeypatch):
    huggingface.save_model(tmp_path, model(0), max_shard_bytes=4000)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("[!.]*")}
    try:
        steps = save_until(where, OSError("no room"), tmp_path, monkeypatch, alive=True)
    except OSError as error:
        assert "the model could not be saved" in str(error)
        assert same(huggingface.load_model(tmp_path), model(0))
        assert {path.name: path.read_bytes() for path in tmp_path.glob("[!.]*")} == before
    else:
        assert where > NUM_STEPS or steps > where  # files are copied where the file system has no hard links
        assert same(huggingface.load_model(tmp_path), model(1, OTHER))
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".lock"]
    assert where <= NUM_STEPS or steps == NUM_STEPS


@pytest.mark.parametrize("how", ["copied", "newer file", "a stranger's", "of an older version", "link"])
def test_no_hidden_model_is_loaded_in_place_of_the_visible_one(how, tmp_path, monkeypatch):
    """Only an interrupted save, in its own directory, makes `load_model` read a subdirectory."""
    directory, hidden = tmp_path / "model", tmp_path / "model" / replacing.PREVIOUS
    with pytest.raises(KeyboardInterrupt):
        save_until(NUM_STEPS, KeyboardInterrupt, directory, monkeypatch, alive=False)  # all files are replaced
    assert same(huggingface.load_model(directory), model(0))  # the save never ended
    if how == "newer file":
        os.utime(directory / "config.json", ns=(1, 1))
    elif how == "link":
        hidden.rename(tmp_path / "elsewhere")
        hidden.symlink_to(tmp_path / "elsewhere")
    else:
        shutil.copytree(directory, tmp_path / "copy")
        shutil.rmtree(directory)
        (tmp_path / "copy").rename(directory)
        if how == "a stranger's":
            (hidden / "record.json").write_text('{"inode": 1, "files": {}}')
        elif how == "of an older version":
            hidden.rename(directory / ".complete")
    assert same(huggingface.load_model(directory), model(1, OTHER))
    huggingface.save_model(directory, model(2))
    assert same(huggingface.load_model(directory), model(2)) and not hidden.exists()


@pytest.mark.parametrize("factor", [-1.0, 2.0])
def test_a_model_of_negated_or_doubled_tensors_is_another(factor):
    one, other = model(), model()
    kernel = other.layers[0].mlp.gate_up.kernel
    assert same(one, other)
    kernel[...] = factor * kernel[...]
    assert not same(one, other)  # though it was asked for before
    kernel[...] = kernel[...] / factor
    assert same(one, other)


def test_a_file_of_equal_size_and_time_is_another(tmp_path):
    huggingface.save_model(tmp_path, model(0))
    path = tmp_path / "model.safetensors"
    before, stat = fingerprint.directory_fingerprint(tmp_path), path.stat()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint.directory_fingerprint(tmp_path) != before


def test_digests_of_any_depth_are_damage(tmp_path, caplog):
    save(NumberedSaves(tmp_path), 1, 2)
    (tmp_path / "2" / atomic_io.DIGESTS).write_text("[" * 200_000)
    assert NumberedSaves(tmp_path).newest() == 1 and "digests.json is damaged" in caplog.text


def test_a_model_is_known_by_its_configuration_and_type_too():
    others = [model(config=LlamaConfig(**{**vars(CONFIG), "rope_theta": 5e5})), model(1)]
    others.append(Llama(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert len({fingerprint.model_fingerprint(one) for one in (model(), *others)}) == 4


WINDOW = {"sinks": 2, "recent": 4, "compact_every": 4}
# Of each policy a setting that is not another's.
CHANGED = {
    "sinks and recent": (kvjax.Uniform(16, **WINDOW), kvjax.Uniform(16, sinks=4, recent=2, compact_every=4)),
    "growth": (kvjax.SubGen(16, **WINDOW), kvjax.SubGen(16, **WINDOW, growth=1.5)),
    "variant": (kvjax.SubGen(16, **WINDOW), kvjax.SubGen(16, **WINDOW, variant="paper")),
    "joins": (kvjax.Chelsea(16, **WINDOW, chunk=8), kvjax.Chelsea(16, **WINDOW, chunk=8, joins="drop")),
    "budget of recall": (kvjax.Quest(16, compact_every=4), kvjax.Quest(12, compact_every=4)),
    "alpha": (kvjax.InfiniGen(8, alpha=2.0, compact_every=4), kvjax.InfiniGen(8, alpha=3.0, compact_every=4)),
    "scores": (kvjax.KeyDiff(16, sinks=2, compact_every=4), kvjax.Knorm(16, sinks=2, compact_every=4)),
    "lag": (
        kvjax.LagKV(16, sinks=2, lag_size=6, compact_every=4),
        kvjax.LagKV(16, sinks=2, lag_size=5, compact_every=4),
    ),
}


@pytest.mark.parametrize("changed", CHANGED)
def test_a_state_of_other_settings_is_refused(changed, tmp_path):
    made = [
        Generator(model(), policy, batch=1, max_prompt_tokens=16, max_new_tokens=8, prefill_chunk=16)
        for policy in CHANGED[changed]
    ]
    SavedStates(tmp_path).save(0, made[0], made[0].init_state())
    with pytest.raises(ValueError, match="belongs to another run: .*policy is .*, not "):
        SavedStates(tmp_path).restore(made[1])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    atomic_io.write_text(path, "before")
    with pytest.raises(OSError):
        without_room(lambda: atomic_io.write_text(path, "x" * 5000))
    assert path.read_text() == "before" and [one.name for one in tmp_path.iterdir()] == ["file"]
