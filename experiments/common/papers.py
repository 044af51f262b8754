"""Every table and figure of the four papers: what it reports, and which rows of which job are its counterpart here.

Figures of the papers are as printed there (SubGen: Zandieh et al. 2024; ClusterGen: its second text, anonymous, under
review at ICLR 2025; BalanceKV: Han et al. 2025; ClusterKV: Liu et al. 2024; Chelsea: Hu et al. 2025).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.common import suites as choices
from experiments.common.results import Row, policy_label


@dataclasses.dataclass(frozen=True)
class Figures:
    """Rows of a job that stand for a table or figure.

    Attributes:
        job: its name in `jobs.JOBS`.
        metric: of the rows.
        where: fields and the values that rows have there; a tuple lists several.
        label: the field that tells methods apart; "policy" is the policy with its settings.
        groups: fields within which methods are compared.
        order: methods, from best to worst as the paper has them; one alone is shown and not ranked; empty where the
            paper ranks none.
        others: whether methods that are not in the order are shown too.
        lower_is_better: of the metric.
        style: how a figure is written.
        title: what the figures are, where an item has several.
    """

    job: str
    metric: str
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    label: str = "policy"
    groups: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    others: bool = False
    lower_is_better: bool = False
    style: str = "{:.2f}"
    title: str = ""

    @property
    def ranked(self) -> bool:
        """Whether the paper puts a method before another."""
        return len(self.order) > 1

    def method(self, row: Row) -> str:
        """What tells a row's method apart."""
        return policy_label(row) if self.label == "policy" else str(row.flat().get(self.label))

    def takes(self, row: Row) -> bool:
        """Whether a row of the job is one of these."""
        if row.metric != self.metric or (self.order and not self.others and self.method(row) not in self.order):
            return False
        flat = row.flat()
        return all(
            flat.get(name) in (wanted if isinstance(wanted, tuple) else (wanted,))
            for name, wanted in self.where.items()
        )


class Item(NamedTuple):
    """A table or figure; several where they report the same of different models."""

    name: str
    what: str
    reported: str = ""  # the paper's figures
    figures: tuple[Figures, ...] = ()
    with_weights: str = ""  # the command for the paper's own models and data
    why: str = ""  # why an order does not hold, as far as measured


class Paper(NamedTuple):
    name: str
    about: str
    items: tuple[Item, ...]


_LONGBENCH = "python -m experiments.longbench --model DIRECTORY --data DIRECTORY"
_NEEDLES = "python -m experiments.needle_in_haystack --model DIRECTORY --needle kamradt --context_tokens 32000"
_8B = "python -m experiments.latency --shape llama-3.1-8b"

_LINES = Figures(
    "line_retrieval_subgen",
    "accuracy",
    groups=("context_tokens", "budget"),
    order=("exact", "clustergen:variant=paper,recent=64", "h2o", "streaming_llm"),
)
_CENTERS = Figures(
    "clusterability",
    "k_center_radius_share",
    where={"centers": 16},
    label="part",
    groups=("layer", "kv_head"),
    order=("keys", "values"),
    lower_is_better=True,
    title="radius that 16 centres leave, share of one centre's",
)
_ANSWERS = Figures(
    "ablations_kept",
    "accuracy",
    where={"ablation": "kept"},
    groups=("budget",),
    title="line retrieval",
)


def _longbench(job: str, *order: str) -> tuple[Figures, ...]:
    """Means over all tasks."""
    return (Figures(job, "mean_score", where={"task": "all"}, groups=("budget",), order=order, style="{:.3f}"),)


def _needles(*order: str) -> tuple[Figures, ...]:
    """Accuracy over all depths of each length."""
    return (
        Figures(
            "needle_in_haystack", "accuracy", where={"depth": None}, groups=("context_tokens", "budget"), order=order
        ),
    )


def _ablation(name: str, *order: str, answers: bool = True, error: str = "relative_error") -> tuple[Figures, ...]:
    """Accuracy and error of an ablation's settings."""
    job = f"ablations_{choices.ABLATIONS[name].system}"
    accuracy = Figures(
        job,
        "accuracy",
        where={"ablation": name},
        groups=("budget",),
        order=order,
        title="line retrieval",
    )
    errors = Figures(
        job,
        error,
        where={"ablation": name},
        groups=("layer", "budget"),
        order=order,
        lower_is_better=True,
        style="{:.3f}",
        title="error of attention",
    )
    return (accuracy, errors) if answers else (errors,)


def _times(job: str, metric: str, title: str, *order: str, style: str = "{:.2f}", **where: Any) -> Figures:
    """Ratios and shares of the experiment on latency."""
    return Figures(
        job,
        metric,
        where=where,
        groups=("context_tokens",),
        order=order,
        lower_is_better=True,
        style=style,
        title=title,
    )


def _long_too(*figures: Figures) -> tuple[Figures, ...]:
    """Figures of `latency`, each followed by the same of the prompts that only some policies read."""
    return tuple(one for short in figures for one in (short, dataclasses.replace(short, job="latency_long")))


def _compared(job: str, *order: str) -> tuple[Figures, ...]:
    """Time to first token, time per token and memory, as ratios to exact."""
    return (
        _times(
            job, "time_to_first_token_over_exact", "time to first token, of exact's", "exact", order[0], style="{:.3f}"
        ),
        _times(job, "ms_per_token_over_exact", "time per token, of exact's", *order),
        _times(job, "memory_over_exact", "memory while decoding, of exact's", *order),
    )


SUBGEN = Paper(
    "SubGen",
    "Sublinear attention by stream clustering. Its experiments run greedy k-center once over keys, which is "
    "`clustergen:variant=paper` here.",
    (
        Item(
            "Figure 1",
            "t-SNE of keys and values with the 16 centres of greedy k-center, Llama-2-7B on MT Bench",
            "keys are more clusterable than values (pictures)",
            (_CENTERS,),
        ),
        Item(
            "Table 1",
            "LongEval line retrieval, longchat-7B, 50 questions; cache reduced by 35 / 42 / 50%",
            "n = 5k / 7k / 9k: exact .98 / 1.0 / .68, SubGen .86 / .66 / .44, H2O .66 / .58 / .38, Sink .56 / .56 / "
            ".38",
            (_LINES,),
            "python -m experiments.line_retrieval --model DIRECTORY --context_tokens 5000 --question seen --policy "
            "exact --policy clustergen:variant=paper,recent=2048 --policy h2o --policy streaming_llm --budget 65%",
        ),
    ),
)

CLUSTERGEN = Paper(
    "ClusterGen (SubGen's second text)",
    "The same algorithm, with four models and LongBench.",
    (
        Item(
            "Figure 1 and appendix B.1",
            "t-SNE of keys and values of OPT-6.7B, MPT-7B, Llama-3.1-8B and Gemma-2-9B on TriviaQA",
            "keys of the models with RoPE are the more clusterable ones (pictures)",
            (_CENTERS,),
        ),
        Item(
            "Table 1",
            "norms of queries",
            "15.8 OPT-6.7B, 13.6 MPT-7B, 15.4 Llama-3.1-8B, 23.8 Gemma-2-9B, whatever the length",
            (Figures("clusterability", "query_norm", label="layer", style="{:.1f}", title="mean norm, by layer"),),
            "python -m experiments.clusterability --model DIRECTORY",
        ),
        Item("Table 2", "SubGen's Table 1", "as there", (_LINES,)),
        Item(
            "Table 3",
            "LongBench, longchat-7B, 2k slots of up to 20k tokens",
            "ahead of AttentionSink on single-document questions and code (the stored text has no figures)",
            _longbench("longbench", "exact", "clustergen:variant=paper", "streaming_llm"),
            f"{_LONGBENCH} --policy exact --policy streaming_llm --policy clustergen:variant=paper,recent=1024 "
            "--budget 2048",
        ),
    ),
)

BALANCEKV = Paper(
    "BalanceKV",
    "Attention by discrepancy theory. `balancekv_reference` is the released code; `balancekv` is ours.",
    (
        Item(
            "Figure 1",
            "error of attention in single layers of Llama-3.1-8B and Ministral-8B on TriviaQA, 1/2 to 1/16 kept",
            "BalanceKV below uniform sampling in all layers and at all rates (plots)",
            (
                Figures(
                    "attention_error_recorded",
                    "relative_error_clamped",
                    groups=("layer", "budget"),
                    order=(f"{choices.STUDIED},block_size=256", "uniform"),
                    others=True,
                    lower_is_better=True,
                    style="{:.3f}",
                    title="the notebook's error",
                ),
                Figures(
                    "attention_error_recorded",
                    "relative_error",
                    groups=("layer", "budget"),
                    order=(f"{choices.STUDIED},block_size=256", "uniform"),
                    others=True,
                    lower_is_better=True,
                    style="{:.3f}",
                    title="relative error",
                ),
            ),
            "python -m experiments.attention_error --model DIRECTORY --stream recorded --recorded_tokens 16384 "
            f"--policy uniform --policy {choices.STUDIED},block_size=256",
            "On synthetic streams balancing gains at key norms up to 4 and nothing at 15 (`python -m "
            "experiments.attention_error`); keys of the shipped model have norms near 17.",
        ),
        Item("Figure 2", "how batches are merged and reduced", "illustration: `kvjax/structures/merge_reduce.py`"),
        Item(
            "Figure 3 and appendix B.1",
            "error and time by batch size 256 / 128 / 64 and rate 1/2 / 1/4 / 1/8, layers 1 and 15 of Llama-3.1-8B",
            "layer 1: .1036 / .1764 / .2655 at 256, .1082 / .1833 / .2741 at 128, .1137 / .1921 / .2858 at 64, in "
            ".0603 / .1190 / .1793 s, .0320 / .0624 / .0922 s and .0189 / .0349 / .0508 s; layer 15: .1107 / .1935 / "
            ".2798, .1121 / .1952 / .2813 and .1141 / .1978 / .2845",
            (
                *_ablation(
                    "balancekv_batch",
                    *(f"{choices.STUDIED},block_size={size}" for size in (256, 128, 64)),
                    answers=False,
                    error="relative_error_clamped",
                ),
                Figures(
                    "ablations_balancekv",
                    "compress_seconds",
                    where={"ablation": "balancekv_batch"},
                    groups=("layer", "budget"),
                    order=tuple(f"{choices.STUDIED},block_size={size}" for size in (64, 128, 256)),
                    lower_is_better=True,
                    style="{:.3f}",
                    title="seconds to compress",
                ),
            ),
        ),
        Item(
            "Table 1",
            "LongBench-E at rate 1/4",
            "averages, exact / BalanceKV / uniform / SnapKV / PyramidKV / StreamingLLM: Qwen2.5-32B 51.77 / 48.84 / "
            "48.76 / 48.77 / 47.13 / 35.52; 14B 54.14 / 50.62 / 49.88 / 50.22 / 49.80 / 38.71; Llama-3.1-8B 50.17 / "
            "46.77 / 46.38 / 46.12 / 45.64 / 39.79",
            _longbench(
                "longbench_e",
                "exact",
                "balancekv_reference",
                "uniform",
                "snapkv",
                "pyramidkv",
                "streaming_llm",
            ),
            f"{_LONGBENCH} --e --policy exact --policy balancekv_reference --policy uniform --policy snapkv "
            "--policy pyramidkv --policy streaming_llm --budget 25%",
        ),
        Item(
            "Figure 4",
            "needle in a haystack, 4k to 100k, Llama-3.1-8B, rate 1/4; BalanceKV with needle augmentation",
            "BalanceKV .99, uniform .90, PyramidKV .90, SnapKV .83, StreamingLLM .31",
            _needles(
                "balancekv_reference:needles=64",
                "uniform",
                "pyramidkv",
                "snapkv",
                "streaming_llm",
            ),
            f"{_NEEDLES} --policy balancekv_reference:needles=1024 --policy uniform --policy snapkv --policy "
            "pyramidkv --policy streaming_llm --budget 25%",
            "Needles single nothing out on the shipped models: of 1,900 tokens they are none, or nearly all.",
        ),
        Item(
            "Table 2",
            "seconds for 16,384 random tokens and 1,024 generated, Llama-3.1-8B",
            "prefill 3.032 exact, 3.662 BalanceKV, 3.681 StreamingLLM, 3.748 PyramidKV, 3.755 SnapKV; decoding 37.8 "
            "exact, 37.2 PyramidKV, 38.1 BalanceKV, 40.3 StreamingLLM, 40.4 SnapKV",
            _long_too(
                _times(
                    "latency",
                    "time_to_first_token_over_exact",
                    "time to first token, of exact's",
                    "exact",
                    "balancekv_reference",
                    "streaming_llm",
                    "pyramidkv",
                    "snapkv",
                    style="{:.3f}",
                ),
                _times(
                    "latency",
                    "ms_per_token_over_exact",
                    "time per token, of exact's",
                    "pyramidkv",
                    "balancekv_reference",
                    "streaming_llm",
                    "snapkv",
                ),
            ),
            f"{_8B} --context_tokens 16384 --policy streaming_llm --policy snapkv --policy pyramidkv "
            "--policy balancekv_reference --budget 25% --answer_tokens 1024",
        ),
    ),
)

CLUSTERKV = Paper(
    "ClusterKV",
    "Everything is kept, clusters are recalled. `clusterkv_paper` is the paper's system. `clusterkv` is ours: clusters "
    "for a group of heads, residual ones, k-means on a sample; times are those of `clusterkv:residual=False`, which "
    "reads as much per group as the paper's per query head.",
    (
        Item(
            "Figures 1, 2, 4, 5, 6, 7 and 8",
            "how methods differ, clustering, system, kernel, indexing",
            "illustrations: `kvjax/policies/clusterkv.py`, `pallas_kernels/k_means`, `pallas_kernels/cluster_recall`",
        ),
        Item(
            "Figure 3",
            "how ranks of tokens move over 64 steps; important tokens per page of 16, Llama-3-8B, 8k",
            "tokens become important and unimportant (plot); a page holds one or two important ones",
            (
                Figures(
                    "recall_rate", "important_per_page", label="layer", title="important tokens per page, by layer"
                ),
                Figures(
                    "recall_rate",
                    "top_kept",
                    where={"steps": (1, 8, 63)},
                    label="steps",
                    groups=("layer",),
                    title="share of a step's important tokens that still are, so many steps later",
                ),
            ),
            "python -m experiments.recall_rate --model DIRECTORY --stream recorded --recorded_tokens 8192",
        ),
        Item(
            "Figure 9 and Table I",
            "LongBench, eight tasks, GLM4-9B-Chat, budgets 256 / 512 / 1,024 / 2,048",
            "ClusterKV 46.69 / 48.02 / 48.34 / 48.7, InfiniGen 43.69 / 45.04 / 45.13 / 45.14, Quest 35.63 / 40.83 / "
            "43.23 / 45.59, full 49.01",
            _longbench("longbench", "exact", "clusterkv_paper", "infinigen", "quest"),
            f"{_LONGBENCH} --policy exact --policy clusterkv_paper:full_layers=2 --policy quest --policy "
            "infinigen --budget 256 --budget 512 --budget 1024 --budget 2048",
        ),
        Item(
            "Figure 10",
            "perplexity on PG19 up to 32k, budget 1,024",
            "within .5 of full; Quest about 4 and InfiniGen about 2 above it",
            (
                Figures(
                    "perplexity",
                    "perplexity_ratio",
                    where={"form": "per_position"},
                    groups=("context_tokens", "budget"),
                    order=("clusterkv_paper", "infinigen", "quest"),
                    lower_is_better=True,
                    style="{:.3f}",
                    title="perplexity, of exact's",
                ),
            ),
            "python -m experiments.perplexity --model DIRECTORY --data DIRECTORY --form per_position --context_tokens "
            "32000 --next_tokens 1 --policy exact --policy clusterkv_paper:full_layers=2 --policy quest --policy "
            "infinigen --budget 1024",
        ),
        Item(
            "Figure 11",
            "recall of the most important tokens against the budget, NarrativeQA, 32k: (a) methods, (b) distances and "
            "numbers of clusters",
            "(a) ClusterKV above Quest and InfiniGen at every budget; (b) cosine above l2 and inner product, more "
            "clusters better, little beyond n/80 (plots)",
            (
                Figures(
                    "recall_rate",
                    "recall",
                    groups=("layer", "recalled_tokens"),
                    label="variant",
                    order=("cosine, n/80, 20 iterations", "pages of 16"),
                    title="(a)",
                ),
                Figures(
                    "recall_rate",
                    "recall",
                    where={"recalled_tokens": (112, 240)},
                    groups=("layer", "recalled_tokens"),
                    label="variant",
                    order=(
                        "cosine, n/80, 20 iterations",
                        "l2, n/80, 20 iterations",
                        "inner product, n/80, 20 iterations",
                    ),
                    title="(b) distances",
                ),
                Figures(
                    "recall_rate",
                    "recall",
                    where={"recalled_tokens": (112, 240)},
                    groups=("layer", "recalled_tokens"),
                    label="variant",
                    order=tuple(f"cosine, n/{tokens}, 20 iterations" for tokens in (20, 40, 80, 160, 320)),
                    title="(b) clusters",
                ),
            ),
            "python -m experiments.recall_rate --model DIRECTORY --stream recorded --recorded_tokens 32000",
            "Clusters hold 80 tokens on average: recalls of 16 and 48 tokens, where pages are ahead in layer 0, hold "
            "none whole.",
        ),
        Item(
            "Figure 12",
            "latency against the full cache, Llama-3.1-8B, prompts of 8k to 32k, 256 to 1,024 tokens written",
            "up to 2x faster end to end and 2.5x the decoding throughput at 32k; clustering 6 to 8% of prefill",
            _long_too(
                _times(
                    "latency",
                    "end_to_end_over_exact",
                    "end to end with 1,000 tokens, of exact's",
                    "clusterkv:residual=False",
                    "exact",
                    answer_tokens=1000,
                ),
                _times(
                    "latency",
                    "ms_per_token_over_exact",
                    "time per token, of exact's",
                    "clusterkv:residual=False",
                    "exact",
                ),
                _times(
                    "latency",
                    "compress_share_of_prefill",
                    "clustering, share of prefill",
                    "clusterkv:residual=False",
                    style="{:.3f}",
                ),
            ),
            f"{_8B} --context_tokens 32768 --policy clusterkv:residual=False,full_layers=2 --budget 1024 "
            "--answer_tokens 1024",
        ),
        Item(
            "Figure 13",
            "latency against InfiniGen (OPT-6.7B, budget 256) and Quest (Llama-3.1-8B, budget 1,024)",
            "2.3x faster than InfiniGen, within 5% of Quest; selection 5% of decoding",
            (
                _times(
                    "latency",
                    "ms_per_token_over_exact",
                    "time per token, of exact's",
                    "quest",
                    "clusterkv:residual=False",
                    "infinigen",
                ),
                _times(
                    "latency",
                    "selection_share_of_decoding",
                    "selection, share of decoding",
                    "clusterkv:residual=False",
                    "quest",
                    "infinigen",
                    style="{:.4f}",
                ),
            ),
            f"{_8B} --context_tokens 32768 --policy clusterkv:residual=False --policy quest --policy infinigen "
            "--budget 1024",
        ),
        Item(
            "Section 5.3",
            "hits of the device cache of the last R = 1 / 2 steps, NarrativeQA, 32k, and what they are worth",
            "63 / 74% of the clusters; throughput 2.3x / 3x that of loading everything",
            (
                Figures(
                    "recall_rate",
                    "hit_rate",
                    where={"policy": "clusterkv"},
                    label="kept_steps",
                    groups=("layer",),
                    title="hits, by R",
                ),
                _times(
                    "latency_host_memory",
                    "ms_per_token_over_exact",
                    "time per token, of exact's",
                    *(f"clusterkv:residual=False,host_steps={steps}" for steps in (2, 1, 0)),
                ),
            ),
            f"{_8B} --context_tokens 32768 --policy clusterkv:residual=False,host_steps=0 --policy "
            "clusterkv:residual=False,host_steps=1 --policy clusterkv:residual=False,host_steps=2 --budget 1024",
            "On a CPU host memory is the device's: nothing is gained by not going there.",
        ),
    ),
)

CHELSEA = Paper(
    "Chelsea",
    "Online clustering by chunked soft matching. `chelsea:slope=None` is the paper's system; with the slope it is "
    "ours.",
    (
        Item("Figure 1", "overview", "illustration: `kvjax/structures/soft_matching.py`, `kvjax/policies/chelsea.py`"),
        Item(
            "Figures 2 and 3",
            "cosine of keys, as maps and by their distance in the text",
            "keys near one another are alike; the cosine falls convexly with the distance (plots)",
            (
                Figures(
                    "key_similarity",
                    "cosine",
                    label="distance",
                    groups=("layer", "kv_head"),
                    order=("1", "2", "8", "64", "256", "1024"),
                ),
            ),
            "python -m experiments.key_similarity --model DIRECTORY",
            "It falls up to a distance of 64 in both layers; in layer 0 it rises again from there.",
        ),
        Item(
            "Table 1",
            "cost of finding partners",
            "products of keys: all pairs n^2, k-means i n k, bipartite n^2 / 4, chunked n c / 4",
            (
                Figures(
                    "key_similarity",
                    "matching_seconds",
                    label="variant",
                    groups=("context_tokens",),
                    order=("chunked", "bipartite", "all pairs"),
                    others=True,
                    lower_is_better=True,
                    style="{:.4f}",
                    title="seconds, one head",
                ),
            ),
        ),
        Item(
            "Figure 4",
            "LongBench against the budget, 12.5 to 80%, Llama-2-7B-32K",
            "Chelsea above SnapKV, CaM and StreamingLLM at most budgets (plots)",
            (dataclasses.replace(_ANSWERS, order=("chelsea:slope=None", "snapkv", "cam", "streaming_llm")),),
            f"{_LONGBENCH} --policy streaming_llm --policy snapkv --policy cam --policy chelsea:slope=None --budget "
            "12.5% --budget 25% --budget 50% --budget 80%",
        ),
        Item(
            "Tables 2, 6, 7 and 8",
            "LongBench at 20%",
            "averages, full / Chelsea / SnapKV / CaM / StreamingLLM: Llama-2-7B-32K 36.79 / 35.12 / 29.27 / 27.68 / "
            "27.55; Llama-3.1-8B 39.43 / 37.87 / 36.38 / 33.91 / 33.90; Qwen2-7B 41.44 / 39.94 / 38.21 / 32.04 / "
            "32.10",
            _longbench("longbench", "exact", "chelsea:slope=None", "snapkv", "cam", "streaming_llm"),
            f"{_LONGBENCH} --policy exact --policy streaming_llm --policy snapkv --policy cam --policy "
            "chelsea:slope=None --budget 20%",
        ),
        Item(
            "Table 3",
            "time and memory at 20%, Llama-3.1-8B, 16k / 32k / 64k",
            "first token 1.784 / 4.212 / 11.421 s full, 1.814 / 4.306 / 11.500 Chelsea, 1.781 / 4.201 / 11.435 CaM; "
            "per token .043 / .071 / .137 s full, .035 / .036 / .043 Chelsea, .068 / .106 / .180 CaM; memory 19.4 / "
            "23.5 / 31.8 GB full, 15.9 / 16.7 / 18.4 Chelsea, 25.6 / 35.5 / 55.4 CaM",
            _long_too(*_compared("latency", "chelsea:slope=None", "exact", "cam")),
            f"{_8B} --context_tokens 16384 --context_tokens 32768 --context_tokens 65536 --policy cam "
            "--policy chelsea:slope=None",
            "`cam` holds no more bytes than the others here; the paper's takes more time and memory than the full "
            "cache.",
        ),
        Item(
            "Figure 5",
            "prompt and 1,000 tokens, Llama-3.1-8B",
            "up to 2.72x faster than full",
            _long_too(
                _times(
                    "latency",
                    "end_to_end_over_exact",
                    "end to end with 1,000 tokens, of exact's",
                    "chelsea:slope=None",
                    "exact",
                    answer_tokens=1000,
                ),
            ),
            f"{_8B} --context_tokens 65536 --policy chelsea:slope=None",
        ),
        Item(
            "Table 4",
            "chunk sizes at 20%, part of LongBench",
            "16: 41.83, 64: 42.68, 256: 42.54, all: 42.81",
            _ablation("chelsea_chunk", *(f"chelsea:slope=None,chunk={chunk}" for chunk in (4096, 64, 256, 16))),
        ),
        Item(
            "Tables 5 and 11",
            "with and without outlier heads at 20%",
            "38.97 with, 36.46 without, SnapKV 31.78, StreamingLLM 30.10",
            _ablation(
                "chelsea_outlier_heads",
                "chelsea:slope=None,heads=CALIBRATED/heads_share.json",
                "chelsea:slope=None",
            ),
            "python -m experiments.ablations --model DIRECTORY --ablation chelsea_outlier_heads",
        ),
        Item(
            "Figures 6 and 7",
            "outlier heads: share of A tokens without an edge of .8, Llama-2-7B-32K and Llama-3.1-8B",
            "a few heads stand out, the same ones on all data (plots)",
            (
                Figures(
                    "calibrate_heads",
                    "share_without_edge",
                    label="kv_head",
                    groups=("task", "layer"),
                    title="share, by kv head",
                ),
                Figures("calibrate_heads", "overlap", label="rule", title="overlap of two corpora's heads, by rule"),
            ),
            "python -m experiments.calibrate_heads --model DIRECTORY",
        ),
        Item(
            "Figure 8",
            "needle in a haystack at 25%, Llama-2-7B-32K",
            "Chelsea ahead of the baselines (heatmaps)",
            _needles("chelsea:slope=None", "snapkv", "cam", "streaming_llm"),
            f"{_NEEDLES} --policy chelsea:slope=None,first=0.25,decay=0 --policy snapkv:recent=100 --policy cam "
            "--policy streaming_llm --budget 25%",
        ),
        Item(
            "Table 9",
            "time and memory at 20%, Llama-2-7B-32K (no groups of heads), 16k / 32k / 64k",
            "first token 1.659 / 3.959 s full, 1.798 / 4.275 / 11.408 Chelsea; per token .047 / .079 s full, .032 / "
            ".032 / .047 Chelsea, .070 / .106 CaM; memory 29.2 / 44.8 GB full, 15.9 / 19.0 / 25.3 Chelsea; full and "
            "CaM do not fit at 64k",
            _compared("latency_ungrouped", "chelsea:slope=None", "exact", "cam"),
            "python -m experiments.latency --shape llama-2-7b-32k --context_tokens 16384 --context_tokens 32768 "
            "--policy cam --policy chelsea:slope=None",
            "As above.",
        ),
        Item(
            "Table 10",
            "time with and without chunks",
            "first token, Llama-2-7B at 16k / 32k: 1.798 / 4.275 s with, 2.097 / 5.456 without; Llama-3.1-8B 1.814 / "
            "4.306 / 11.500 with, 1.842 / 4.526 / 13.156 without; per token alike",
            (
                _times(
                    "latency_chunk",
                    "time_to_first_token_over_exact",
                    "time to first token, of exact's",
                    "chelsea:slope=None",
                    "chelsea:slope=None,chunk=4096",
                    style="{:.3f}",
                ),
            ),
            f"{_8B} --context_tokens 16384 --policy chelsea:slope=None --policy chelsea:slope=None,chunk=16384",
        ),
    ),
)

_PRINTED = (SUBGEN, CLUSTERGEN, BALANCEKV, CLUSTERKV, CHELSEA)
_SHOWN = {figures.where.get("ablation") for paper in _PRINTED for item in paper.items for figures in item.figures}

CHOICES = Paper(
    "Choices of the systems",
    "One at a time, where the papers name a value but no figure, or ours differs: answers, and the error of attention "
    "on recorded streams.",
    tuple(
        Item(name, f"{one.choice} ({one.source})", figures=_ablation(name))
        for name, one in choices.ABLATIONS.items()
        if name not in _SHOWN
    ),
)

PAPERS = (*_PRINTED, CHOICES)
