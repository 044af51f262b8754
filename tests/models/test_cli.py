"""The console command, called in this process; `test_wheel` calls the installed one."""

import io
import json
import os
import re
import subprocess
import sys

import pytest

from kvjax.registry import POLICIES, THEORY
from kvjax_models import cli, load
from kvjax_models.cli import many
from kvjax_models.cli.generate import Generate
from kvjax_models.saves import describe_difference
from tests.models import tiny
from tests.models.support import ROOT

MODEL = f"--model={tiny.directory()}"
CONTEXT = "Read the record.\n" + "".join(f"line {number}: the code is {7 * number}\n" for number in range(16))
PROMPT = ("generate", MODEL, "--prompt=x")
QUESTION = "\nWhich code is in line 3?"


@pytest.fixture
def kvjax(capsys, monkeypatch):
    """Calls the command and returns its standard output and error."""

    def call(*args, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        cli.main(cli.parse(["kvjax", *map(str, args)]))
        return capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def answer():
    """The greedy continuation of context and question with the full cache, 8 tokens."""
    return load(tiny.directory()).generate(CONTEXT + QUESTION, max_new_tokens=8)


def test_generate_from_a_file_a_pipe_and_an_option(kvjax, answer, tmp_path, monkeypatch):
    text = CONTEXT + QUESTION
    (tmp_path / "prompt.txt").write_text(text, "utf-8-sig")  # with a byte order mark
    options = ("generate", MODEL, "--max_new_tokens", "8")
    policy = ("--policy=uniform:recent=16", "--budget=90%")
    assert "of a full bfloat16 cache" in kvjax(*options, *policy, f"--prompt_file={tmp_path / 'prompt.txt'}").err
    for prompt in (("--prompt_file", "-"), (), ("--prompt", text, "--dtype=bfloat16")):
        output = kvjax(*options, *prompt, stdin=text).out
        assert output.strip() == answer.strip() or "bfloat16" in prompt[-1]
    with pytest.raises(SystemExit, match="kvjax: the prompt is empty; pass --prompt TEXT"):
        kvjax(*options, stdin="")
    monkeypatch.setattr("kvjax_models.cli.generate._is_piped", lambda: False)  # a terminal
    with pytest.raises(SystemExit, match="kvjax: a prompt is required: --prompt TEXT, --prompt_file FILE"):
        kvjax(*options, stdin=text)


def test_progress_and_summary(kvjax, monkeypatch):
    options = ("generate", MODEL, "--max_new_tokens=3", "--prompt=Read the record.")
    plain = kvjax(*options)
    assert "reading" not in plain.err and " tokens/s, " in plain.err and " s of compilation;" in plain.err
    full = r"cache [\d.]+ KiB on the device, a full bfloat16 cache takes [\d.]+ KiB, 0 B on the host"
    assert re.search(full, plain.err)
    assert "on the device, holds 100%: the text is short, 0 B on the host" in kvjax(*options, "--policy=snapkv").err
    assert kvjax(*options, "--quiet").err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    shown = kvjax(*options)
    assert shown.out == plain.out and "compiling, then reading " in shown.err and "step 2" in shown.err
    assert kvjax(*options, "--quiet").err == ""
    monkeypatch.setattr("sys.stderr", None)  # statistics are never written to standard output
    assert kvjax(*options).out == plain.out


def test_generate_asks_a_saved_document(kvjax, answer, tmp_path):
    context, question, document = tmp_path / "context.txt", tmp_path / "question.txt", tmp_path / "document"
    context.write_text(CONTEXT)
    question.write_text(QUESTION)
    options = "--max_new_tokens=64", "--policy=uniform", "--budget=512 slots"
    saved = kvjax("generate", MODEL, f"--prompt_file={context}", *options, f"--save_document={document}")
    assert "tokens read and saved" in saved.err
    with pytest.warns(UserWarning, match="is the name of a file") as hints:
        kvjax("generate", MODEL, f"--prompt={context}", "--max_new_tokens=64", f"--save_document={tmp_path / 'name'}")
    assert len(hints) == 1
    with pytest.raises(SystemExit, match="already has a saved document; open it"):
        kvjax("generate", MODEL, "--prompt=another text", f"--save_document={document}")
    with pytest.raises(SystemExit, match=r"--policy is that of the saved document, Document.*policy='uniform'"):
        kvjax("generate", MODEL, f"--document={document}", "--prompt=x", "--policy=streaming_llm@64 slots")
    questions = [f"--prompt_file={question}"] * 2
    asked = kvjax("generate", MODEL, f"--document={document}", *questions, "--max_new_tokens=8")
    assert "[uniform: 2 answers about a text of" in asked.err
    answers = asked.out.split(f"== {question}\n")[1:]
    assert [text.strip() for text in answers] == [answer.strip()] * 2
    # By default, up to the capacity, which a question takes a part of.
    asked = kvjax("generate", MODEL, f"--document={document}", questions[0])
    assert asked.out.removeprefix(f"== {question}\n").startswith(answer.strip())


def test_tokens_after_a_stop_string_are_not_counted(kvjax):
    options = ["generate", MODEL, "--prompt=Read the record.", "--max_new_tokens=60"]
    text = kvjax(*options).out.removesuffix("\n")
    assert len(text) > 5
    expected, count = text.partition(text[2:4])[0] + "\n", text.index(text[2:4]) + 2  # a token is a character
    first = kvjax(*options, f"--stop={text[2:4]}")
    assert first.out == expected and f"{count} generated at" in first.err


def test_generate_completes_a_file_of_prompts_and_resumes(kvjax, answer, tmp_path):
    text, output = CONTEXT + QUESTION, tmp_path / "out" / "texts.jsonl"
    lines = [text, {"id": "short", "prompt": "Read the record.", "max_new_tokens": 3}, {"prompt": text[:200]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    options = (
        "generate", MODEL, f"--prompts_file={tmp_path / 'prompts.jsonl'}", f"--output={output}", "--batch_size=2",
        "--max_new_tokens=8", "--policy=exact:compact_every=4",
    )  # fmt: skip
    assert "3 prompts, whose caches took up to" in kvjax(*options).err
    completed = output.read_text()
    rows = [json.loads(line) for line in completed.splitlines()]
    assert [row["number"] for row in rows] == [0, 1, 2] and [row.get("id") for row in rows] == [None, "short", None]
    assert rows[0]["text"] == answer
    assert rows[1]["new_tokens"] == 3 and rows[1]["finish_reason"] == "length"
    with pytest.raises(SystemExit, match="texts.jsonl exists; continue it with --resume"):
        kvjax(*options)
    # As after a kill: completions in the order in which they finished, and a truncated one.
    first, _, last = completed.splitlines()
    output.write_text(f"{last}\n{first[:30]}")
    assert "2 prompts, whose caches took" in kvjax(*options, "--resume", "--batch_size=4").err
    assert output.read_text() == completed
    # A damaged line, and one that is too deeply nested.
    output.write_text(completed.replace('{"number": 0', '{"number: 0', 1) + "[" * 100_000 + "\n")
    assert "1 prompts, whose caches took" in kvjax(*options, "--resume").err
    assert output.read_text() == completed
    with pytest.raises(SystemExit, match=r"texts.jsonl belongs to another run: sampling.temperature is 0.0, not 1.0"):
        kvjax(*options, "--resume", "--temperature=1")


def test_a_run_with_another_budget_is_not_resumed():
    """The longest prompt has 144 slots with both; the other one has 32 with a share, and 144 with the bytes."""
    llm = load(tiny.directory())
    lines = [many.PromptLine([1] * tokens, 64, 0, None) for tokens in (1000, 300)]
    manifests = []
    for budget in ("50%", "112192B"):
        options = Generate(policy="uniform:recent=16", budget=budget)
        manifests.append(many._manifest(options, [], llm, options.cache(llm), lines))
    assert manifests[0]["policy"] == manifests[1]["policy"]
    assert describe_difference(*manifests) == "budget.bytes is 112192, not None"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: Expecting property name"),
        ("3", "line 1: a line must be a text, or an object with either prompt or messages"),
        ('{"prompt": "x", "max_tokens": 3}', "line 1: unknown keys max_tokens; allowed: id, max_new_tokens, messages"),
        ('{"prompt": "x", "seed": "1"}', "line 1: seed='1' must be an integer"),
        ("[" * 100_000, "line 1: "),
        ('{"prompt": "x", "id": "\\ud800"}', "line 1: 'utf-8' codec can't encode"),
        ('{"messages": [1]}', "line 1: a prompt must be a text or a list of messages"),
        ('{"prompt": 1}', "line 1: prompt must be a text, and messages a list of objects"),
        ('{"prompt": "x", "max_new_tokens": 0}', "line 1: the prompt has .* tokens and max_new_tokens=0; both must"),
        ("", "contains no prompts"),
    ],
)
def test_invalid_lines_are_refused(kvjax, tmp_path, line, message):
    (tmp_path / "prompts.jsonl").write_text(f"{line}\n")
    with pytest.raises(SystemExit, match=message):
        kvjax("generate", MODEL, f"--prompts_file={tmp_path / 'prompts.jsonl'}", f"--output={tmp_path / 'texts'}")


def test_bench_compares_with_the_full_cache(kvjax):
    output = kvjax(
        "bench", MODEL, "--context_tokens=300", "--tokens=4", "--turns=2", "--policy=uniform:recent=16",
        "--policy=streaming_llm@96 slots", "--budget=100%",
    ).out  # fmt: skip
    head, columns, *lines = output.splitlines()
    assert head == "300 tokens, batch 1" and columns.split()[:2] == ["policy", "cache"]
    cells = [re.split(" {2,}", line) for line in lines]
    shares = {policy: float(share.strip("%")) for policy, _, share, *_ in cells}
    assert list(shares) == ["exact", "uniform:recent=16@100%", "streaming_llm@96 slots"]
    assert shares["streaming_llm@96 slots"] < shares["uniform:recent=16@100%"] <= 100 < shares["exact"]  # float32


@pytest.mark.parametrize("word", ["--version", "--help", "models", "policies"])
def test_commands_without_a_model_do_not_import_jax(word):
    code = (
        f"import atexit, sys; sys.argv = ['kvjax', {word!r}]; atexit.register(lambda: print('jax' in sys.modules)); "
        "from kvjax_models import cli; cli.run()"
    )
    lines = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) > 1 and lines[-1] == "False"
    assert word != "--version" or lines[0] == f"kvjax {cli.kvjax.__version__}"


def test_policies_lists_all_policies_and_settings(kvjax):
    lines = kvjax("policies").out.splitlines()
    practical = [name for name in POLICIES if name not in THEORY]
    assert [line.split()[0] for line in lines[: len(practical) + 1]] == ["auto", *practical]
    assert [line.split()[0] for line in lines[len(practical) + 3 :][: len(THEORY)]] == [*THEORY]
    assert lines[1].split(maxsplit=1)[1].startswith("Keeps every key and value.")
    assert "It stands for kvzap:heads=auto" in kvjax("policies", "auto").out
    details = kvjax("policies", "subgen").out
    assert "recent: int = 64" in details and "SubGen, Algorithm 1" in details
    assert "samples: int or None = None" in details


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "--prompt=x"), "kvjax: --model is required"),
        (("generate", MODEL, "--prompt="), "kvjax: the prompt is empty; pass --prompt TEXT, --prompt_file FILE (- for"),
        (("generate", MODEL, "--prompt_file=no_such_file"), "kvjax: no_such_file does not exist"),
        (("generate", MODEL, "--prompt_file=/"), "kvjax: / cannot be used: Is a directory"),
        (("generate", MODEL, "--prompts_file=no_such_file", "--output=y"), "kvjax: no_such_file does not exist"),
        (("bench", MODEL, "--prompt_file=no_such_file"), "kvjax: no_such_file does not exist"),
        (("chat", MODEL, "--prompt_file=no_such_file"), "kvjax: no_such_file does not exist"),
        (("calibrate", str(tiny.directory()), "--text=no_such_file"), "kvjax: no_such_file does not exist"),
        ((*PROMPT, "--document=no_such_file"), "no_such_file has no saved document"),
        ((*PROMPT, "--policy=snapkv:heads=no_such_file"), "snapkv:heads=no_such_file: no_such_file does not exist"),
        ((*PROMPT, "--policy=uniform", "--budget=25"), "budget='25' has no unit; pass '25%'"),
        ((*PROMPT, "--prompt_file=-"), "kvjax: several texts require --document"),
        ((*PROMPT, "--resume"), "kvjax: --resume requires --prompts_file"),
        ((*PROMPT, "--policy=snapvk"), "is unknown; did you mean 'snapkv'?"),
        ((*PROMPT, "--policy=snapkv:windw_size=8"), "'windw_size'; did you mean 'window_size'?"),
        ((*PROMPT, "--policy=" + "x" * 10**6), "...xxx"),
        (("generate", "--model=" + "x" * 10**6, "--prompt=x"), "xxx' is not a model: File name too long"),
        (("policies", "ato"), "did you mean 'auto'?"),
        (("bench", MODEL, "--batch=1000000000"), "kvjax: --batch=1000000000 must be at most 65536 rows"),
        (("chat", MODEL, "--context_tokens=10000000"), "exceeds the model's context length of"),
        ((*PROMPT, "--policy=uniform", "--budget=" + "9" * 400 + "%"), "kvjax: budget='999"),
        ((*PROMPT, "--max_new_tokens=0"), "kvjax: --max_new_tokens=0 must be at least 1"),
        ((*PROMPT, "--min_p=2"), "kvjax: min_p=2.0 must be greater than 0 and at most 1"),
        ((*PROMPT, "--document=y", "--save_document=z"), "cannot be combined with"),
        (("generate", MODEL, "--prompts_file=x"), "kvjax: --prompts_file and --output require each other"),
        (("generate", MODEL, "--prompts_file=x", "--output=y", "--prompt=z"), "cannot be combined with --prompt"),
        ((*PROMPT, "--budget=50%"), "--budget=50% has no effect on --policy=exact, which"),
        (("bench", MODEL, "--policy=uniform@64 slots", "--budget=50%"), "--policy=uniform@64 slots has a budget;"),
        (("download", "no_such"), "kvjax: model 'no_such' is unknown; choose one of smollm2-135m, gemma-3-270m"),
        (("chat", MODEL), "kvjax: this checkpoint has no chat template"),
        (("bench", MODEL, "--turns=0"), "kvjax: --context_tokens, --batch, --tokens and --turns must be at least 1"),
    ],
)
def test_user_errors_are_one_line(kvjax, args, message):
    with pytest.raises(SystemExit) as error:
        kvjax(*args, stdin="Hello\n")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("args", [("generate", MODEL, "--prompt_file=-"), ("chat", MODEL)])
def test_a_closed_input_is_an_error(args, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(SystemExit, match="kvjax: standard input is closed"):
        cli.main(cli.parse(["kvjax", *args]))


def run_bash(script):
    """Runs a bash script in a subprocess, with the command in `$KVJAX`."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "models")]),
        "KVJAX": f"{sys.executable} -m kvjax_models.cli",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # it would warn about a full disk
    }
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=environment)


def test_closed_outputs_end_the_command():
    process = run_bash("$KVJAX policies | true; exit ${PIPESTATUS[0]}")
    assert process.returncode == 141 and process.stderr == ""
    process = run_bash("$KVJAX policies >&-")
    assert process.returncode == 1
    assert process.stderr.splitlines() == ["kvjax: standard output is closed; redirect it to a file"]


def test_a_warning_and_an_error_are_one_line_each(tmp_path):
    """The prompt is the name of a file, and the disk is full."""
    (tmp_path / "book.txt").write_text("A book.")
    options = f"{MODEL} --prompt=book.txt --max_new_tokens=4 --save_document=run --quiet"
    process = run_bash(f"cd {tmp_path}; trap '' XFSZ; ulimit -f 1; $KVJAX generate {options}")
    assert process.returncode == 1
    # Threads of orbax and tensorstore must not print tracebacks.
    *warnings, error = process.stderr.splitlines()
    assert warnings and all(one.startswith("kvjax: the text 'book.txt' is the name of a file") for one in warnings)
    assert error.startswith("kvjax: the document could not be saved")


def test_an_interrupt_ends_the_command_during_a_long_call(tmp_path):
    """The signal arrives while the main thread is in a call of 60 seconds, such as a compilation."""
    (tmp_path / "module.py").write_text(
        "import os, signal, threading, time\n"
        "from kvjax_models.runner.generator import Generator\n"
        "def interrupt():\n"
        f"    open({str(tmp_path / 'time')!r}, 'w').write(str(time.time()))\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "def prefill(*args, **options):\n"
        "    threading.Timer(0.5, interrupt).start()\n"
        "    time.sleep(60)\n"
        "Generator.prefill_steps = prefill\n"
    )
    options = f'{MODEL} --prompt="Read the record." --max_new_tokens=100 --policy_module={tmp_path / "module.py"}'
    process = run_bash(f"$KVJAX generate {options}; status=$?; date +%s.%N; exit $status")
    assert (process.returncode, process.stderr) == (130, "")
    assert float(process.stdout.splitlines()[-1]) - float((tmp_path / "time").read_text()) < 30


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*PROMPT, "stray"), "unknown arguments: ['stray']"),
        (("generate", "--modle=x", "--prompt=x"), "unknown option --modle; did you mean '--model'?"),
        (("generate", MODEL, "--top_k=two"), "invalid int value: 'two'"),
        (("generate", MODEL, "--dtype=int3"), "invalid choice: 'int3' (choose from 'float32', 'bfloat16', 'float16')"),
        (("no_such",), "invalid choice: 'no_such'"),
    ],
)
def test_invalid_arguments_are_refused(args, message, capsys):
    with pytest.raises(SystemExit) as error:
        cli.parse(["kvjax", *args])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_flags_may_have_hyphens(kvjax, tmp_path):
    (tmp_path / "prompt-file").write_text("Read the record.")
    args = ("generate", MODEL, "--max-new-tokens=2", "--policy=uniform:recent=1@64 slots")
    expected = kvjax(*args, "--prompt-file", str(tmp_path / "prompt-file")).out
    assert kvjax(*args, f"--prompt-file={tmp_path / 'prompt-file'}").out == expected
    options = cli.parse(["kvjax", "generate", "--prompt=--a-b", "--max-new-tokens=3"])
    assert (options.prompt, options.max_new_tokens) == ("--a-b", 3)


@pytest.mark.parametrize(
    "command", ["generate", "chat", "serve", "bench", "policies", "models", "download", "calibrate"]
)
def test_help_has_no_empty_defaults_and_no_names_of_types(command, capsys):
    with pytest.raises(SystemExit):
        cli.parse(["kvjax", command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert not re.search(r"\(default:\s+(None|\[\])?\)|\[Literal\]|typing|\[(str|int|float)\]", text), text
    assert ("--dtype {float32,bfloat16,float16}" in text) == (
        command in ("generate", "chat", "serve", "bench", "calibrate")
    )
    if command == "generate":
        assert (
            'Share of the full cache (25%), bytes (64MiB), or slots per KV head ("256 slots"); 25% by default.' in text
        )
        assert "--mesh_tensor int Devices per group; they share the work of every layer. (default: 1)" in text
