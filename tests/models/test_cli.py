"""The console command, called in this process; `tests/models/test_wheel.py` calls the installed one."""

import io
import json
import shutil

import pytest

from experiments.common import settings
from experiments.common.options import LINES_CHECKPOINT, Run
from experiments.common.tasks import line_retrieval as task
from kvjax.registry import POLICIES
from kvjax_models import cli

MODEL = f"--model={settings.model_directory(LINES_CHECKPOINT)}"


@pytest.fixture
def kvjax(capsys, monkeypatch):
    """Calls the command, and returns what it wrote: text, and beside it."""

    def call(*words, given=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        cli.main(cli.parse(["kvjax", *words]))
        return capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def asked():
    """A document of about 500 tokens and its right answer, as text."""
    _, tokenizer = settings.load_model(Run())
    [document] = task.documents(
        7, 1, lambda rng: task.generate_for_tokens(rng, lambda text: len(tokenizer.encode(text)), 500)
    )
    return document


def test_generate_answers_from_a_file_or_a_pipe(kvjax, asked, tmp_path):
    (tmp_path / "prompt.txt").write_text(asked.context + asked.question)
    done = kvjax(
        "generate", MODEL, "--policy=uniform:recent=16", "--budget=90%", f"--prompt_file={tmp_path / 'prompt.txt'}",
        "--max_new_tokens=8",
    )  # fmt: skip
    assert "of the full cache" in done.err
    for prompt, given in ((("--prompt_file", "-"), asked.context + asked.question),):
        done = kvjax("generate", MODEL, *prompt, "--max_new_tokens", "8", given=given)
        assert task.parse_answer(done.out) == asked.answer
    done = kvjax(
        "generate", MODEL, "--prompt", asked.context + asked.question, "--max_new_tokens=8", "--dtype=bfloat16"
    )
    assert task.parse_answer(done.out) == asked.answer


def test_generate_goes_on_where_its_newest_save_stands(kvjax, tmp_path):
    words = (
        "generate", MODEL, "--prompt=Read the record.", "--max_new_tokens=12", "--temperature=1",
        "--policy=exact:compact_every=4", f"--save_dir={tmp_path / 'run'}", "--save_every=4",
    )  # fmt: skip
    whole = kvjax(*words)
    saves = sorted((tmp_path / "run" / "states").glob("[0-9]*"), key=lambda path: int(path.name))
    shutil.rmtree(saves[-1])  # as if it had been killed before its end
    resumed = kvjax(*words, "--resume")
    assert "tokens restored in" in resumed.err
    assert resumed.out == whole.out
    with pytest.raises(SystemExit, match="run is {'seed': 0}, not {'seed': 1}"):
        kvjax(*words, "--resume", "--seed=1")
    with pytest.raises(SystemExit, match="already has saves of step .*; resume from them"):
        kvjax(*words)


def test_generate_continues_a_saved_prefix(kvjax, asked, tmp_path):
    (tmp_path / "context.txt").write_text(asked.context)
    (tmp_path / "question.txt").write_text(asked.question)
    kvjax(
        "generate", MODEL, f"--prompt_file={tmp_path / 'context.txt'}", "--max_new_tokens=64",
        f"--save_prefix={tmp_path / 'read'}",
    )  # fmt: skip
    with pytest.raises(SystemExit, match="already has saves of step 0"):
        kvjax("generate", MODEL, "--prompt=another text", f"--save_prefix={tmp_path / 'read'}")
    question = f"--prompt_file={tmp_path / 'question.txt'}"
    done = kvjax("generate", MODEL, f"--prefix={tmp_path / 'read'}", question, question, "--max_new_tokens=8")
    answers = done.out.split(f"== {tmp_path / 'question.txt'}\n")[1:]
    assert [task.parse_answer(answer) for answer in answers] == [asked.answer] * 2


def test_generate_takes_a_file_of_prompts_and_goes_on_with_it(kvjax, asked, tmp_path):
    question, output = asked.context + asked.question, tmp_path / "out" / "texts.jsonl"
    lines = [question, {"id": "short", "prompt": "Read the record.", "max_new_tokens": 3}, {"prompt": question[:200]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    words = (
        "generate", MODEL, f"--prompts_file={tmp_path / 'prompts.jsonl'}", f"--output={output}", "--batch_size=2",
        "--max_new_tokens=8", "--policy=exact:compact_every=4",
    )  # fmt: skip
    assert "3 prompts in 2 batch rows, whose caches take" in kvjax(*words).err
    whole = output.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["number"] for row in rows] == [0, 1, 2] and [row.get("id") for row in rows] == [None, "short", None]
    assert task.parse_answer(rows[0]["text"]) == asked.answer
    assert rows[1]["new_tokens"] == 3 and rows[1]["finish_reason"] == "length"
    with pytest.raises(SystemExit, match="texts.jsonl exists; continue it with --resume"):
        kvjax(*words)
    # As a kill may leave it: rows as they ended, and one that was cut off.
    first, _, last = whole.splitlines()
    output.write_text(f"{last}\n{first[:30]}")
    assert "2 prompts in 4 batch rows" in kvjax(*words, "--resume", "--batch_size=4").err
    assert output.read_text() == whole
    with pytest.raises(SystemExit, match=r"texts.jsonl belongs to another run: sampling is {'temperature': 0.0}, not"):
        kvjax(*words, "--resume", "--temperature=1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: Expecting property name"),
        ("3", "line 1: a line must be a text, or an object with either prompt or messages"),
        ('{"prompt": "x", "max_tokens": 3}', "line 1: unknown keys max_tokens; allowed: id, max_new_tokens, messages"),
        ('{"prompt": "x", "seed": "1"}', "line 1: seed='1' must be an integer"),
        ('{"prompt": 1}', "line 1: prompt must be a text, and messages a list of objects"),
        (
            '{"prompt": "x", "max_new_tokens": 0}',
            "line 1: the prompt has .* tokens and max_new_tokens=0; both must be at",
        ),
        ("", "contains no prompts"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(kvjax, tmp_path, line, message):
    (tmp_path / "prompts.jsonl").write_text(f"{line}\n")
    with pytest.raises(SystemExit, match=message):
        kvjax("generate", MODEL, f"--prompts_file={tmp_path / 'prompts.jsonl'}", f"--output={tmp_path / 'texts'}")


def test_bench_stands_beside_exact(kvjax):
    done = kvjax(
        "bench", MODEL, "--context_tokens=300", "--tokens=4", "--turns=2", "--policy=uniform:recent=16",
        "--policy=streaming_llm@96", "--budget=50%",
    )  # fmt: skip
    head, columns, *lines = done.out.splitlines()
    assert head == "300 tokens, batch 1" and columns.split()[:2] == ["policy", "cache"]
    held = {line.split()[0]: float(line.split()[3].strip("%")) for line in lines}
    assert list(held) == ["exact", "uniform:recent=16@50%", "streaming_llm@96"]
    assert held["exact"] == 100 and held["streaming_llm@96"] < held["uniform:recent=16@50%"] <= 50


def test_policies_are_listed_with_their_settings(kvjax):
    listed = kvjax("policies").out
    assert [line.split()[0] for line in listed.splitlines()[: len(POLICIES)]] == list(POLICIES)
    assert listed.splitlines()[0].split(maxsplit=1)[1].startswith("Keeps every key and value.")
    detail = kvjax("policies", "subgen").out
    assert (
        "recent: int = 64" in detail and "variant: 'mean_value' or 'self_normalised' or 'paper' = mean_value" in detail
    )
    assert "SubGen, Algorithm 1" in detail


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "--prompt=x"), "kvjax: --model is required"),
        (("generate", MODEL), "kvjax: a prompt is required: --prompt TEXT, --prompt_file FILE"),
        (("generate", MODEL, "--prompt_file=no_such_file"), "No such file"),
        (("generate", MODEL, "--prompt=x", "--prompt_file=-"), "kvjax: several texts require --prefix"),
        (("generate", MODEL, "--prompt=x", "--resume"), "kvjax: --resume requires --save_dir"),
        (("generate", MODEL, "--prompt=x", "--policy=no_such"), "kvjax: policy 'no_such' is unknown"),
        (("generate", MODEL, "--prompt=x", "--policy=uniform", "--budget=7q"), "kvjax: budget='7q' is not a budget"),
        (("generate", MODEL, "--prompt=x", "--policy=uniform"), "kvjax: budget=25% of"),
        (("generate", MODEL, "--prompt=x", "--max_new_tokens=0"), "kvjax: --max_new_tokens=0 must be at least 1"),
        (("generate", MODEL, "--prompt=x", "--save_every=0"), "kvjax: --save_every=0 must be at least 1"),
        (("generate", MODEL, "--prompt=x", "--temperature=-1"), "kvjax: temperature=-1"),
        (("generate", MODEL, "--prompt=x", "--stop=y"), "kvjax: --stop requires --prompts_file"),
        (("generate", MODEL, "--prompts_file=x"), "kvjax: --prompts_file and --output require each other"),
        (
            ("generate", MODEL, "--prompts_file=x", "--output=y", "--prompt=z"),
            "--prompts_file cannot be combined with --prompt",
        ),
        (
            ("generate", MODEL, "--prompt=x", "--budget=50%"),
            "kvjax: --budget=50% has no effect on --policy=exact, which keeps everything; pass another --policy",
        ),
        (
            ("generate", MODEL, "--prompt=x", "--policy=uniform@64", "--budget=50%"),
            "kvjax: --policy=uniform@64 has a budget; remove it or --budget=50%",
        ),
        (
            ("generate", MODEL, "--prompt=x", "--policy=uniform", "--budget=250%"),
            "kvjax: budget=250% exceeds the full cache; pass at most",
        ),
        (("bench", MODEL, "--budget=0%"), "kvjax: budget=0% is an empty cache; pass more than 0"),
        (
            ("bench", MODEL, "--budget=0.25"),
            "kvjax: budget='0.25' is not a budget; pass slots (1024), 25% for",
        ),
        (("chat", MODEL), "kvjax: this checkpoint has no chat template"),
        (("policies", "no_such"), "kvjax: policy 'no_such' must be one of balancekv"),
        (("bench", MODEL, "--turns=0"), "kvjax: --context_tokens, --batch, --tokens and --turns must be at least 1"),
    ],
)
def test_a_users_error_is_one_line(kvjax, words, message):
    with pytest.raises(SystemExit) as ended:
        kvjax(*words, given="Hello\n")
    assert message in str(ended.value) and "\n" not in str(ended.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", MODEL, "--prompt=x", "stray"), "unknown arguments: ['stray']"),
        (("generate", "--modle=x", "--prompt=x"), "Unknown command line flag 'modle'"),
        (("generate", MODEL, "--top_k=two"), "invalid int value: 'two'"),
        (("no_such",), "invalid choice: 'no_such'"),
    ],
)
def test_words_that_are_no_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.parse(["kvjax", *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_flags_may_have_hyphens(kvjax, tmp_path):
    (tmp_path / "prompt-file").write_text("Read the record.")
    words = (MODEL, "--max-new-tokens=2", "--policy=uniform:recent=1@64")
    done = kvjax("generate", *words, "--prompt-file", str(tmp_path / "prompt-file"))
    assert kvjax("generate", *words, f"--prompt-file={tmp_path / 'prompt-file'}").out == done.out
    options = cli.parse(["kvjax", "generate", "--prompt=--a-b", "--save-every=3"]).command
    assert (options.prompt, options.save_every) == ("--a-b", 3)


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.parse(["kvjax", "--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"kvjax {cli.kvjax.__version__}\n"


def test_help_shows_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit):
        cli.parse(["kvjax", "generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "--budget [str] Slots per KV head (1024), bytes (64MiB), or a share of the full cache; 25% by default." in shown
    )
    assert "--mesh_tensor int Devices per group; they share the work of every layer. (default: 1)" in shown
