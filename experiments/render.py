"""Writes the tables and pictures of README and of the results' pages from the rows in `results/`.

    python -m experiments.render

A page has markers, `<!-- render: NAME -->` and `<!-- end -->`, between which this command writes a table or links to
pictures (`BLOCKS`). Rows that are added to `results/*.jsonl.gz` need no change of a page. Pages have values only;
`results/intervals.csv` has all settings with 95% intervals.
"""

import csv
import dataclasses
import io
import json
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import device, peers, summarize
from experiments.common import ROOT, caches, claims, pictures, plots
from experiments.common.console import markdown_table
from experiments.common.flags import Flags, run_command
from experiments.common.output import figure_table
from experiments.common.pictures import FULL_CACHE, PRESS, Cell
from experiments.common.rows import Row, group_by, read_rows
from experiments.common.statistics import Estimate
from experiments.tasks import RULER

RESULTS = ROOT / "experiments" / "results"
PAPERS = ROOT / "experiments" / "papers"
IMAGES = ROOT / "docs" / "images"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md")), RESULTS / "README.md")
MARKERS = re.compile(r"(<!-- render: ([^\n]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# The systems of the five papers, with the policy that is the published one.
SYSTEMS = {
    "subgen": "SubGen", "clustergen": "ClusterGen", "balancekv": "BalanceKV", "clusterkv": "ClusterKV",
    "chelsea": "Chelsea",
}  # fmt: skip
NAMES = SYSTEMS | {
    "exact": FULL_CACHE, "auto": "auto", "subgen_mean": "SubGen, means", "balancekv_theory": "BalanceKV, theory",
    "snapkv": "SnapKV", "kvzip": "KVzip", "kvzap": "KVzap", "h2o": "H2O", "pyramidkv": "PyramidKV",
    "streaming_llm": "StreamingLLM", "uniform": "uniform sample", "quest": "Quest", "infinigen": "InfiniGen",
    "cam": "CaM",
}  # fmt: skip
# The published form, where the default settings differ from it.
PUBLISHED = {"subgen:light_values=0,self_normalization=0.0": "subgen"}
ALL_TOKENS = ("exact", "auto", "clusterkv", "quest", "infinigen")  # the model's profile changes nothing
MIN_DOCUMENTS = 5  # of a press in tables and in the picture of README, and of a length in README's sentence
FEW_HEADS = ("gemma-3-270m",)  # models whose caches have 4 bits from 20% of the bytes on, like `auto`
FEW_BITS = {"int8": "8 bits", "int4": "4 bits", "int3": "3 bits", "int2": "2 bits"}  # formats of the full cache
AUTO_BUDGETS = ("25%", "12.5%", "6.25%", "3.125%")  # that are compared with them
SUMMARY_PAIRS = (("25%", "int4"), ("12.5%", "int3"), ("12.5%", "int2"))  # next to each other in bytes
# What `auto` has, part by part: the policy, and the format at 25% and at 12.5%.
PARTS = {
    "the map, 16 bits": ("kvzap", None, None),
    "layers (PyramidKV), 16 bits": ("pyramidkv", None, None),
    "heads, 16 bits": ("streaming_llm:heads=auto", "bfloat16", "bfloat16"),
    "heads and map, 16 bits": ("kvzap:heads=auto", "bfloat16", "bfloat16"),
    "the map, few bits": ("kvzap", "int8", "int4"),
    "5 heads, few bits": ("streaming_llm:heads=build/heads5.json", "int8", "int4"),
    "9 heads, few bits": ("streaming_llm:heads=build/heads9.json", "int8", "int4"),
    "heads (16 of 90), few bits": ("streaming_llm:heads=auto", "int8", "int4"),
    "heads, map and few bits: `auto`": ("auto", None, None),
}
PARTS_SEED = 2  # of the documents of which all parts were measured
# Model, task, tokens, dtype, budget and format of the comparisons with a uniform sample.
UNIFORM = (
    ("smollm2-135m", "facts", 1024, "float32", "25%", "int8"),
    ("smollm2-135m", "niah_multivalue", 1024, "bfloat16", "25%", "int8"),
    ("smollm2-135m", "perplexity_books", 2048, "bfloat16", "25%", "int8"),
    ("smollm2-135m", "perplexity_books", 2048, "bfloat16", "12.5%", "int4"),
    ("smollm2-135m", "perplexity_books", 4096, "float32", "25%", "int8"),
    ("gemma-3-270m", "facts", 1024, "float32", "25%", "int8"),
    ("qwen2.5-coder-0.5b", "facts", 8192, "float32", "12.5%", "int4"),
    ("qwen2.5-coder-0.5b", "facts", 16384, "float32", "12.5%", "int4"),
    ("qwen2.5-coder-0.5b", "niah_multivalue", 8192, "float32", "12.5%", "int4"),
)
MODELS = {
    "smollm2-135m": "SmolLM2-135M", "gemma-3-270m": "Gemma 3 270M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
}  # fmt: skip
BY_BYTES = "smollm2-135m", "facts", 1024, "unseen"  # model, task, tokens and question of the picture by bytes
LENGTHS = ("qwen2.5-coder-0.5b", "facts")  # model and task of the picture by length, and of README
FRONT_TOKENS, FRONT_GPU_TOKENS = 8192, 131072  # of README's answers and times
# Rows of README: name, setting of the answers, and the setting of the time or why it is missing. The papers'
# systems were timed with equal heads, because a model with random weights has no profile.
FRONT = (
    ("full cache", "exact", "exact"),
    ("full cache, 4 bits", "exact, int4", "not timed [1]"),
    ("`auto`", "auto @ 25%", "auto @ 25%"),
    ("`auto`", "auto @ 12.5%", "auto @ 12.5%"),
    ("`auto`", "auto @ 6.25%", "not timed [1]"),
    ("kvpress, KVgrad", "kvpress KVgrad @ 12.5% of the prompt", "in PyTorch"),
    ("kvpress, KVgrad", "kvpress KVgrad @ 6.25% of the prompt", "in PyTorch"),
    ("Chelsea", "chelsea:heads=auto @ 12.5%, int4", "chelsea @ 12.5%"),
    ("BalanceKV", "balancekv:heads=auto @ 12.5%, int4", "balancekv @ 12.5%"),
    ("SubGen", "subgen:heads=auto @ 12.5%, int4", "subgen @ 25%"),
    ("ClusterGen", "clustergen:heads=auto @ 12.5%, int4", "not timed [1]"),
    ("ClusterKV", "clusterkv @ 12.5%", "clusterkv @ 12.5%"),
    ("uniform sample", "uniform:heads=auto @ 12.5%, int4", "not timed [1]"),
)
CSV_COLUMNS = (
    "model", "task", "tokens", "question", "dtype", "metric", "setting", "held", "question_and_answer", "read",
    "score", "low", "high", "minus_full_cache", "minus_low", "minus_high", "documents", "errors",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of the renderer, which has none."""


class Results(NamedTuple):
    """All measurements: rows of `experiments.evaluate`, and cells of tables."""

    rows: list[Row]
    cells: list[Cell]


def main(_: Options) -> None:
    """Writes pages, pictures and the file of intervals."""
    results = read_results()
    texts = {path: render(path.read_text(encoding="utf-8"), results) for path in PAGES}
    texts[RESULTS / "intervals.csv"] = intervals(results.rows)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(path)
    for name, figure in figures(results).items():
        plots.save(figure, IMAGES / name)


def read_results() -> Results:
    """Returns all rows and their cells."""
    rows = read_rows(sorted(RESULTS.glob("*.jsonl.gz")))
    return Results(rows, make_cells(rows))


def render(page: str, results: Results) -> str:
    """Returns a page with the tables between its markers.

    Raises:
        KeyError: if a marker names no block.
    """

    def block(match: re.Match[str]) -> str:
        name, _, argument = match[2].partition(" ")
        text = BLOCKS[name](argument, results)
        return f"{match[1]}{text}\n{match[3]}" if BLOCKS[name] in PARAGRAPHS else f"{match[1]}\n{text}\n{match[3]}"

    return MARKERS.sub(block, page)


def figures(results: Results) -> dict[str, pictures.plt.Figure]:
    """Returns the pictures by file name."""
    front = [cell for cell in results.cells if cell.column == BY_BYTES]
    model, task = LENGTHS
    panels = {
        tokens: few_bits_curves(rows)
        for (*case, tokens, _), rows in few_bits_cases(results.rows).items()
        if case == [model, task]
    }
    drawn = {
        "score_by_bytes.png": pictures.score_by_bytes(front, SYSTEMS.values()),
        "score_by_length.png": pictures.score_by_length(panels, f"{model}, {task}, asked after compression"),
    }
    for (model, question), cells in matrices(results.cells).items():
        drawn[f"matrix_{model}_{question}.png"] = pictures.matrix(cells, f"{model}, question {question}")
    return drawn


# Rows, and cells: one per policy, budget and task.


def select(rows: Iterable[Row], **labels: Any) -> list[Row]:
    """Returns the rows with the values of some fields."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in labels.items())]


def policy_of(text: str) -> tuple[str, bool] | None:
    """Returns the name of a policy in tables, and whether it has the heads of the model's profile.

    Args:
        text: the policy of a row.

    Returns:
        None for a policy with other settings than those, which tables leave out.
    """
    if text.startswith(PRESS):
        return text, False
    name, _, settings = PUBLISHED.get(text, text).partition(":")
    others = {one for one in settings.split(",") if one and not one.startswith("compact_every=")}
    return (NAMES.get(name, name), bool(others)) if others <= {"heads=auto"} and " " not in name else None


def make_cells(rows: Iterable[Row]) -> list[Cell]:
    """Returns the cells of tables: settings with a budget in percent, and the full cache.

    Rows of version 0.3 whose budgets include question and answer, although the question is not part of the text, are
    left out, except for kvpress, whose presses need `MIN_DOCUMENTS`. Of several settings for one cell, the one
    with most documents counts, or the one with 4 bits for models in `FEW_HEADS`.
    """

    def labels(row: Row) -> tuple[str, str, int, str, str, str]:
        task = "RULER" if row.task.partition(":")[0] in RULER else row.task
        return row.model, task, row.tokens, row.question, row.metric, row.dtype

    comparable = [row for row in rows if row.is_of_text or row.question == "seen" or row.policy.startswith(PRESS)]
    best: dict[tuple[Any, ...], tuple[tuple[bool, bool, int], Cell]] = {}
    for (model, task, tokens, question, metric, _), of_group in group_by(labels, comparable).items():
        by_setting = {row.setting: row for row in of_group}
        for line in _lines(of_group):
            row = by_setting[line.setting]
            named = policy_of(row.policy)
            budget = "100%" if line.setting == caches.FULL else (row.budget or "").removesuffix(peers.OF_PROMPT)
            is_small = row.policy.startswith(PRESS) and line.documents < MIN_DOCUMENTS
            if named is None or line.mean is None or not budget.endswith("%") or is_small:
                continue
            share = float(budget[:-1])
            cell = Cell(model, task, tokens, question, metric, *named, share, line)
            key = model, task, tokens, question, metric, named, share
            # A cell whose PUBLISHED form is measured shows that form.
            rank = row.policy in PUBLISHED, model in FEW_HEADS and row.kv_dtype == "int4", line.documents
            if key not in best or rank > best[key][0]:
                best[key] = rank, cell
    return [cell for _, cell in best.values()]


def _lines(rows: Sequence[Row]) -> list[summarize.Line]:
    """Returns the lines of rows of one group; rows of kvpress are paired with the same documents' full cache."""
    of_text = [dataclasses.replace(row, tail_fraction=None) for row in rows]
    return [line for table in summarize.summarize(of_text) for line in table.lines]


def matrices(cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """Returns the cells of every matrix, by model and question: without kvpress, of tasks with a compressed cache.

    Models with most cells come first. Texts that are read through the cache have separate tables.
    """
    cells = [cell for cell in cells if not (cell.policy.startswith(PRESS) or cell.task.startswith("stream_"))]
    compressed = {cell.column for cell in cells if cell.policy != FULL_CACHE}
    count = Counter(cell.model for cell in cells)
    found = group_by(lambda cell: (cell.model, cell.question), [cell for cell in cells if cell.column in compressed])
    return dict(sorted(found.items(), key=lambda item: (-count[item[0][0]], item[0][1] == "seen")))


# Blocks of README.


def front_table(_: str, results: Results) -> str:
    """Returns the table of README: bytes, answers and times of full caches, `auto`, kvpress and the papers' systems."""
    model, task = LENGTHS
    of_length = select(results.rows, model=model, task=task, tokens=FRONT_TOKENS, question="unseen")
    lines = {line.setting: line for line in _lines(of_length)}
    steps = [
        row
        for row in device.read_rows(RESULTS / "h200.jsonl")
        if (row.get("measure"), row.get("rows")) == ("latency", 1)
    ]
    times = {}
    for row in sorted(steps, key=lambda row: row["context_tokens"]):  # the longest text of a setting counts
        note = "" if row["context_tokens"] == FRONT_GPU_TOKENS else " [2]"
        times[row["setting"]] = f"{row['ms_per_token'][0]:.1f} ms ({row['ms_per_token_ratio'][0]:.2f}){note}"
    table = []
    for name, setting, timed in FRONT:
        line = lines.get(setting)
        if line is None or line.mean is None:
            shown = "not measured", "", "", ""
        else:
            read = f", reads {line.read:.1%}" if line.held > 0.9 > line.read else ""
            answers = f"{line.mean.value:.2f}", _signed(line.difference), str(line.documents)
            shown = f"{line.held:.1%}{read}", *answers
        table.append((name, *shown, times.get(timed, timed)))
    columns = ("", "bytes", "right answers", "minus the full cache", "texts", "time per token")
    return markdown_table(columns, table)


def few_bits_summary(_: str, results: Results) -> str:
    """Returns the sentence of README that compares `auto` with all tokens in few bits."""
    of_task = [
        rows
        for case, rows in few_bits_cases(results.rows).items()
        if case[1] == LENGTHS[1] and len({row.document for row in rows}) >= MIN_DOCUMENTS
    ]
    parts = []
    for budget, kv_dtype in SUMMARY_PAIRS:
        found = [few_bits_difference(rows, budget, kv_dtype) for rows in of_task]
        pairs = [one for one in found if one is not None]
        values = sorted(one.value for one in pairs)
        clear = f"{sum(one.low > 0 for one in pairs)} of {len(pairs)}"
        span = " to ".join(dict.fromkeys(f"{one:+.2f}" for one in (values[0], values[-1])))
        parts.append(f"{budget} minus {FEW_BITS[kv_dtype]} {span} ({clear})")
    text = "Share of answers, `auto` minus few bits, by model and length (95% intervals above zero): "
    return textwrap.fill(f"{text}{', '.join(parts)}.", 120)


# Blocks of the page about quality.


def matrix_images(_: str, results: Results) -> str:
    """Returns the pictures of all models."""
    return "\n".join(
        f"![Scores of {model}, question {question}](../images/matrix_{model}_{question}.png)\n"
        for model, question in matrices(results.cells)
    )


def unsolved_tasks(_: str, results: Results) -> str:
    """Returns the tasks that the full cache does not solve, which say little about compressed caches."""
    left_out: dict[str, float] = {}
    for table in summarize.summarize(results.rows):
        model = table.title.partition(",")[0]
        left_out |= {f"`{task}` of {model} ({score:.2f})": score for task, score in table.left_out.items()}
    return ", ".join(sorted(left_out)) + "."


def settings_table(argument: str, results: Results) -> str:
    """Returns a table of all settings of one task: `TASK of MODEL, QUESTION, DTYPE, BUDGET`."""
    task, _, labels = argument.partition(" of ")
    model, question, dtype, budget = labels.split(", ")
    rows = select(results.rows, model=model, task=task, question=question, dtype=dtype)
    lines = []
    for one in _lines([row for row in rows if row.policy == caches.FULL or row.budget == budget]):
        score = "-" if one.mean is None else f"{one.mean.value:.3f}"
        lines.append((one.setting, f"{one.held:.1%}", score, _signed(one.difference, 3)))
    return markdown_table(("", "held", "value", "minus the full cache"), lines)


def lengths_table(argument: str, results: Results) -> str:
    """Returns scores of all settings of the tasks of one model and length: `MODEL, TOKENS`."""
    model, tokens = argument.split(", ")
    rows = select(results.rows, model=model, tokens=int(tokens), question="unseen")
    by_task = {
        task: {line.setting: line for line in _lines(select(rows, task=task))}
        for task in dict.fromkeys(row.task for row in rows)
    }
    solved = {task: lines for task, lines in by_task.items() if lines[caches.FULL].mean is not None}
    held = {setting: line.held for lines in reversed(solved.values()) for setting, line in lines.items()}
    documents = {task: lines[caches.FULL].documents for task, lines in solved.items()}

    def score(task: str, setting: str) -> str:
        """Returns the score of a setting, and the number of its texts if it has fewer than the full cache."""
        line = solved[task].get(setting)
        fewer = f", {line.documents} of them" if line is not None and line.documents < documents[task] else ""
        return _with_difference(line) + fewer

    table = [
        (setting, f"{held[setting]:.1%}", *(score(task, setting) for task in solved))
        for setting in sorted(held, key=lambda one: (-held[one], one))
    ]
    return markdown_table(("", "held", *(f"`{task}` ({count} texts)" for task, count in documents.items())), table)


def parts_table(_: str, results: Results) -> str:
    """Returns the scores of the parts of `auto` on `facts`, with paired differences to the full cache."""
    labels = dict(zip(("model", "task", "tokens", "question"), BY_BYTES, strict=True))
    rows = select(results.rows, dtype="float32", seed=PARTS_SEED, **labels)
    lines = {line.setting: line for line in _lines(rows)}
    settings = {
        FULL_CACHE: ["exact", "exact"],
        f"all tokens, 4 bits: {lines['exact, int4'].held:.0%} of the bytes": ["exact, int4", "exact, int4"],
    }
    for name, (policy, *formats) in PARTS.items():
        pairs = zip(("25%", "12.5%"), formats, strict=True)
        settings[name] = [str(caches.Setting(policy, budget, kv_dtype)) for budget, kv_dtype in pairs]
    table = [(name, *(_with_difference(lines.get(one)) for one in chosen)) for name, chosen in settings.items()]
    return markdown_table(("", "25%", "12.5%"), table)


def _signed(difference: Estimate | None, digits: int = 2) -> str:
    """Returns a difference with its interval."""
    return "-" if difference is None else difference.fixed("+", digits)


def _with_difference(line: summarize.Line | None) -> str:
    """Returns the score of a line, and the difference to the full cache."""
    if line is None or line.mean is None:
        return "-"
    return f"{line.mean.value:.2f}" + ("" if line.difference is None else f" ({_signed(line.difference)})")


def few_bits_cases(rows: Iterable[Row]) -> dict[tuple[str, str, int, str], list[Row]]:
    """Returns the rows with the question unseen of every task that the full cache answers in few bits.

    They are by model, task, tokens and dtype.
    """
    unseen = [row for row in rows if row.is_of_text and row.question == "unseen"]
    return {
        case: of_case
        for case, of_case in sorted(group_by(lambda row: (row.model, row.task, row.tokens, row.dtype), unseen).items())
        if any(row.policy == caches.FULL and row.kv_dtype in FEW_BITS for row in of_case)
    }


def few_bits_table(argument: str, results: Results) -> str:
    """Returns scores of all tokens in few bits, and what `auto` answers more, paired by document: `TASK,TASK`."""
    lines = []
    for (model, task, tokens, _), rows in few_bits_cases(results.rows).items():
        by_setting = {line.setting: line for line in _lines(rows)}
        for kv_dtype, name in FEW_BITS.items():
            line = by_setting.get(f"{caches.FULL}, {kv_dtype}")
            if line is None or line.mean is None or task not in argument.split(","):
                continue
            differences = [few_bits_difference(rows, budget, kv_dtype) for budget in AUTO_BUDGETS]
            label = f"{MODELS.get(model, model)}, `{task}`, {tokens:,}"
            values = f"{line.held:.1%}", f"{line.mean.value:.2f}", *map(_signed, differences), str(line.documents)
            lines.append((label, name, *values))
    columns = ["", "all tokens in", "held", "score", *(f"`auto` {one} minus it" for one in AUTO_BUDGETS), "documents"]
    return markdown_table(columns, lines)


def few_bits_difference(rows: Sequence[Row], budget: str, kv_dtype: str) -> Estimate | None:
    """Returns the difference of the scores of `auto` and all tokens in few bits, paired by document.

    Args:
        rows: rows of one task.
        budget: budget of `auto`.
        kv_dtype: format of the full cache.

    Returns:
        The difference; None without common questions, or if `auto` holds more bytes.
    """
    settings = f"auto @ {budget}", f"{caches.FULL}, {kv_dtype}"
    of_auto, few = (select(rows, setting=setting) for setting in settings)
    pair = summarize.paired_differences(of_auto, few, sorted({row.task for row in rows}))
    if pair is None:
        return None
    auto_held, few_held = (sum(row.cache_fraction for row in part) / len(part) for part in (of_auto, few))
    return pair if auto_held <= few_held else None


def few_bits_curves(rows: Sequence[Row]) -> dict[str, list[summarize.Line]]:
    """Returns the curves of the picture by length: the full cache, `auto`, few bits, and kvpress's presses."""
    curves: dict[str, list[summarize.Line]] = {}
    for line in _lines(rows):
        policy, _, kv_dtype = line.setting.partition(", ")
        policy, _, budget = policy.partition(" @ ")
        if policy == caches.FULL:
            curves.setdefault("all tokens in few bits" if kv_dtype else FULL_CACHE, []).append(line)
        elif (policy == "auto" and budget in AUTO_BUDGETS) or policy.startswith(PRESS):
            curves.setdefault(policy, []).append(line)
    order = (FULL_CACHE, "auto", "all tokens in few bits")
    return {name: curves[name] for name in (*order, *sorted(curves.keys() - set(order))) if name in curves}


# Blocks of the other pages.


def kvpress_table(_: str, results: Results) -> str:
    """Returns the presses with the best scores, at each budget, with `auto` on the same task."""
    lines = []
    presses = [cell for cell in results.cells if cell.policy.startswith(PRESS)]
    for column, budget in sorted({(cell.column, cell.budget) for cell in presses}, key=lambda one: (one[0], -one[1])):
        of_budget = [cell for cell in results.cells if (cell.column, cell.budget) == (column, budget)]
        best = sorted((cell for cell in of_budget if cell in presses), key=lambda cell: -cell.value)[:6]
        for cell in (*(cell for cell in of_budget if cell.policy == "auto"), *best):
            line = cell.line
            values = f"{line.held:.1%}", f"{cell.value:.2f}", _signed(line.difference), str(line.documents)
            lines.append((cell.policy, f"{cell.model}, {cell.task}, {cell.tokens:,}", *values))
    return markdown_table(("", "task, tokens", "held", "score", "minus the full cache", "documents"), lines)


def read_papers() -> list[tuple[str, dict[str, Any]]]:
    """Returns the names of the papers' systems and the contents of `papers/*.toml`."""
    return [(name, tomllib.loads((PAPERS / f"{policy}.toml").read_text("utf-8"))) for policy, name in SYSTEMS.items()]


def papers_tables(_: str, results: Results) -> str:
    """Returns a table per paper: claims, verdicts as published and with the profile, and what decides them."""
    text = ""
    for name, paper in read_papers():
        lines, not_run = [], []
        for result in paper["results"]:
            published = claims.verdict(result, results.rows, RESULTS)
            with_profile = claims.verdict({"compare": result.get("profile", [])}, results.rows, RESULTS)
            if published == with_profile == claims.NOT_RUN:
                not_run.append(result["name"])
            else:
                last = with_profile if "profile" in result else "-"
                lines.append((result["name"], result["claim"].rstrip("."), published, last))
        table = markdown_table(("result", "claim", "as published", "with the profile"), lines).replace("---:", "---")
        text += f"## [{name}]({paper['link']})\n\n{table}\n"
        text += f"Not run: {', '.join(not_run)}.\n\n" if not_run else ""
    return text.rstrip("\n") + "\n"


def papers_commands(_: str, results: Results) -> str:
    """Returns the commands of the papers' results."""
    commands: dict[str, list[str]] = {}
    for name, paper in read_papers():
        for result in paper["results"]:
            for command in filter(None, result.get("command", "").split("; ")):
                commands.setdefault(command, []).append(f"{name}, {result['name']}")
    lines = "\n".join(f"# {'; '.join(names)}\n{command}\n" for command, names in commands.items())
    return f"```\n{lines}```\n"


def uniform_table(_: str, results: Results) -> str:
    """Returns paired differences of the papers' systems to a uniform sample, all with the model's heads."""
    policies = [one for one in (*SYSTEMS, "subgen_mean", "balancekv_theory") if one not in ALL_TOKENS]
    table: dict[str, list[str]] = {policy: [] for policy in policies}
    for model, task, tokens, dtype, budget, kv_dtype in UNIFORM:
        labels = {"model": model, "task": task, "tokens": tokens, "dtype": dtype, "budget": budget}
        rows = select(results.rows, **labels, kv_dtype=kv_dtype, question="unseen")
        uniform = select(rows, policy="uniform:heads=auto")
        for policy in policies:
            found = summarize.paired_differences(select(rows, policy=f"{policy}:heads=auto"), uniform, [task])
            table[policy].append(_signed(found, 3))
    columns = ("", *(f"{MODELS[model]}, `{task}`, {tokens}, {budget}" for model, task, tokens, _, budget, _ in UNIFORM))
    return markdown_table(columns, [(NAMES[policy], *values) for policy, values in table.items()])


def figures_table(argument: str, results: Results) -> str:
    """Returns a table of figures: `METRIC,METRIC of FILE`."""
    names, _, file = argument.partition(" of ")
    metrics = names.split(",")
    found = [one for one in json.loads((RESULTS / file).read_text()) if one["metric"] in metrics]
    found.sort(key=lambda one: metrics.index(one["metric"]))
    values = [{key: value for key, value in one.items() if key not in ("low", "high")} for one in found]
    if len({one.get("context_tokens") for one in values}) > 1:
        values = [one | {"setting": f"{one['setting']}, {one['context_tokens']} tokens"} for one in values]
    return markdown_table(*figure_table(values, "setting"))


def device_table(argument: str, results: Results) -> str:
    """Returns a table of rows of `experiments.device`: `TITLE of FILE where FIELD=VALUE: COLUMN,COLUMN`."""
    match = re.fullmatch(r"(.+) of (\S+?)(?: where (\w+)=(\w+))?: (\S+)", argument)
    assert match is not None
    title, file, field, wanted, columns = match.groups()
    rows = [
        {key: value[0] if isinstance(value, list) else value for key, value in row.items()}
        for row in device.read_rows(RESULTS / file)
        if field is None or row.get(field) == wanted
    ]
    return device.table(title, rows, columns.split(","))


BLOCKS: Mapping[str, Callable[[str, Results], str]] = {
    "front": front_table,
    "matrices": matrix_images,
    "unsolved": unsolved_tasks,
    "settings": settings_table,
    "parts": parts_table,
    "few_bits": few_bits_table,
    "few_bits_summary": few_bits_summary,
    "lengths": lengths_table,
    "kvpress": kvpress_table,
    "papers": papers_tables,
    "uniform": uniform_table,
    "commands": papers_commands,
    "figures": figures_table,
    "device": device_table,
}
PARAGRAPHS = (few_bits_summary,)  # blocks that need no empty lines around them


def intervals(rows: Sequence[Row]) -> str:
    """Returns all settings and tasks with intervals, as CSV."""

    def labels_of(row: Row) -> tuple[str, str, int, str, str, str, bool]:
        return row.model, row.task, row.tokens, row.question, row.dtype, row.metric, row.is_of_text

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for (*labels, _), of_group in sorted(group_by(labels_of, summarize.place_failures(rows)).items()):
        for table in summarize.summarize(of_group, floor=0.0):
            for line in table.lines:
                score = line.scores.get(of_group[0].task)
                values = (line.held, line.tail, line.read, *(score or (None,) * 3), *(line.difference or (None,) * 3))
                numbers = ("" if value is None or value != value else f"{value:.4f}" for value in values)
                writer.writerow((*labels, line.setting, *numbers, line.documents, line.errors))
    return text.getvalue()


if __name__ == "__main__":
    run_command(main, Options)
