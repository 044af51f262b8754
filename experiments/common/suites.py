"""Every list of policies and budgets that experiments run, named once."""

from typing import Any, NamedTuple


class Suite(NamedTuple):
    """Policies at every budget."""

    policies: tuple[str, ...]
    budgets: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _suite(text: str) -> Suite:
    """A suite from words: budgets | policies."""
    budgets, policies = text.split("|")
    return Suite(_words(policies), _words(budgets))


# Of exact's bytes, as many as there are to choose from.
SWEPT = ("5%", "10%", "12.5%", "20%", "25%", "50%", "80%")
# As it runs in the notebook of BalanceKV's single-layer study; its own default, of the other experiments, is 1.
STUDIED = "balancekv:temperature=0.1"


SUITES = {
    # Every system as published and as this project proposes it, and every baseline.
    "all": _suite("""50% 25% |
        exact uniform streaming_llm clustergen:recent=64 subgen subgen_mean balancekv chelsea
        clusterkv clusterkv_residual quest infinigen h2o h2o:average=True cam
        snapkv pyramidkv compactor expected_attention keydiff kvzip:alpha_safeguard=0.0 lagkv leverage_scores
        tova"""),
    "quick": _suite("50% | exact uniform streaming_llm"),
    # Variants of each system on line retrieval.
    "lines": _suite("""50% 25% |
        exact uniform streaming_llm streaming_llm:reindex=True clustergen:recent=64
        subgen subgen_mean balancekv chelsea clusterkv clusterkv_residual quest infinigen h2o
        h2o:average=True cam snapkv pyramidkv"""),
    # The best variant of each system there, as runs with seeds 0 to 9 showed.
    "lines, best": _suite(
        "50% 25% | exact uniform streaming_llm clustergen:recent=64 subgen balancekv chelsea clusterkv"
    ),
    "peers, quick": _suite("50% | exact streaming_llm kvzip:alpha_safeguard=0.0"),
    "latency": _suite("""20% |
        exact streaming_llm uniform snapkv pyramidkv cam subgen subgen_mean balancekv chelsea clusterkv
        clusterkv_residual quest infinigen"""),
    # The best variant of each system, which `experiments.device` measures.
    "latency, best": _suite("20% | leverage_scores subgen_mean balancekv chelsea clusterkv"),
    "throughput": _suite("25% | exact leverage_scores subgen_mean balancekv chelsea clusterkv"),
    "decoding": _suite("""20% |
        exact streaming_llm uniform clustergen subgen subgen_mean balancekv chelsea
        clusterkv quest h2o snapkv"""),
    "compiled": _suite("""4096 |
        exact streaming_llm uniform clustergen subgen subgen_mean balancekv chelsea clusterkv quest
        infinigen h2o cam snapkv pyramidkv"""),
    "pods": _suite("4096 | exact subgen balancekv chelsea clusterkv"),
}


class DemoMethod(NamedTuple):
    """A row of `experiments.demo`.

    Attributes:
        name: name in tables, the paper's where there is one.
        policy: its policy.
        budget: share of the full cache's bytes that it holds.
        kv_dtype: quantization of keys and values.
        note: what it is, and whether it differs from the paper.
    """

    name: str
    policy: str
    budget: str | None = "25%"
    kv_dtype: Any = None
    note: str = ""


DEMO = (
    DemoMethod("full cache", "exact", None, note="all keys and values in float32"),
    DemoMethod("KVzip, int8", "kvzip", kv_dtype="int8", note="selection + quantization; kvjax: equal shares of heads"),
    DemoMethod("SnapKV", "snapkv", note="selection by the last queries of the text"),
    DemoMethod("SubGen (means)", "subgen_mean", note="merging into clusters; kvjax: means of values"),
)


class Study(NamedTuple):
    """What `experiments.attention_error` measures where flags do not say otherwise."""

    policies: tuple[str, ...]
    budgets: tuple[str, ...] = ("50%", "25%", "12.5%", "6.25%", "5%")
    norms: tuple[float, ...] = (2.0, 4.0, 8.0, 15.0)
    baseline: str = "uniform"  # the policy that others are compared with


STUDIES = {
    "policies": Study(_words("uniform subgen subgen_mean balancekv balancekv_theory")),
    # Both papers' Algorithm 1, which their theorems are about.
    "theory": Study(("uniform", "subgen", "balancekv_theory")),
    # As the paper has it, and dropping merged tokens instead of taking their means.
    "chelsea": Study(("uniform", "chelsea"), ("25%", "12.5%")),
    # Whether clusters that are not read stay present, at equal bytes read.
    "recall": Study(
        ("clusterkv", "clusterkv_residual", "clusterkv_residual:cluster_tokens=40", "quest", "uniform"),
        ("50%", "25%", "12.5%", "6.25%"),
        baseline="clusterkv",
    ),
}

# --- ablations ---

# In a policy's settings: the folder of the files that `experiments.calibrate_heads` writes.
CALIBRATED = "CALIBRATED"
RULES = ("share", "error")  # by which it finds heads


class Ablation(NamedTuple):
    """Settings that differ in one choice of a system."""

    choice: str
    source: str  # where the papers vary it
    policies: tuple[str, ...]
    budgets: tuple[str, ...] = ("20%",)


ABLATIONS = {
    "kept": Ablation(
        "how much is kept, of every system",
        "Chelsea, Figure 4 (12.5 to 80%); BalanceKV, section 4.1 and Figure 1",
        _words(
            """exact uniform streaming_llm h2o h2o:average=True snapkv pyramidkv cam clustergen subgen
            subgen_mean balancekv chelsea quest infinigen clusterkv clusterkv_residual"""
        ),
        SWEPT,
    ),
    "chelsea_chunk": Ablation(
        "entries among which a partner is looked for; 4,096: all",
        "Chelsea, Table 4",
        tuple(f"chelsea:chunk={chunk}" for chunk in (16, 64, 256, 4096)),
    ),
    "chelsea_outlier_heads": Ablation(
        "heads that keep everything, at equal slots: none, by the paper's rule, by the error of attention",
        "Chelsea, Tables 5 and 11",
        ("chelsea", *(f"chelsea:heads={CALIBRATED}/heads_{rule}.json" for rule in RULES)),
        ("20%", "50%"),
    ),
    "chelsea_schedule": Ablation(
        "the share of entries merged per step: the paper's three, constant, as many as can be",
        "Chelsea, appendix C.2",
        (
            *(f"chelsea:schedule={name}" for name in ("llama-2", "llama-3", "qwen")),
            *(f"chelsea:first={first},decay=0" for first in (0.25, 0.5)),
        ),
    ),
    "chelsea_sinks": Ablation(
        "tokens kept from the prompt's start",
        "Chelsea, section 7.1 (16)",
        tuple(f"chelsea:sinks={sinks}" for sinks in (0, 4, 16, 64)),
    ),
    "chelsea_recent": Ablation(
        "tokens kept from the prompt's end",
        "Chelsea, section 7.1 (64)",
        tuple(f"chelsea:recent={recent}" for recent in (0, 16, 64, 256)),
    ),
    "balancekv_batch": Ablation(
        "tokens that are balanced against one another, and the share of them that is kept",
        "BalanceKV, Figure 3 and appendix B.1",
        (
            "uniform",
            *(f"{STUDIED},block_size={size}" for size in (64, 128, 256)),
        ),
        ("50%", "25%", "12.5%"),
    ),
    "balancekv_needles": Ablation(
        "tokens unlike the others, kept whatever the walk says",
        "BalanceKV, section 4.3",
        _words("balancekv balancekv:needles=64"),
        ("50%", "25%"),
    ),
    "clusterkv_clusters": Ablation(
        "tokens per cluster, against pages of 16",
        "ClusterKV, Figure 11b",
        (*(f"clusterkv:clusters={clusters}" for clusters in (100, 200, 400, 800)), "quest"),
        ("25%", "12.5%"),
    ),
    "clusterkv_selection": Ablation(
        "the paper's system, and means of the clusters that are not read",
        "ours",
        ("clusterkv", "clusterkv_residual"),
        ("25%", "12.5%"),
    ),
    "clustergen_recent": Ablation(
        "how much of the budget is the newest tokens",
        "SubGen, section 3.2; ClusterGen, section 4.1 (the better of 2,048 and 3,072 of 5,000 to 9,000)",
        tuple(f"clustergen:recent={recent}" for recent in (16, 64, 256)),
        ("50%", "25%"),
    ),
    "subgen_parameters": Ablation(
        "samples per cluster, and pairs sampled by value norm",
        "SubGen, Theorem 1 (t and s)",
        ("subgen_mean", *(f"subgen:per_cluster={samples}" for samples in (1, 2, 4))),
        ("25%",),
    ),
    "subgen_growth": Ablation(
        "how fast the clusters' radius grows",
        "ours",
        tuple(f"subgen_mean:growth={growth}" for growth in (1.1, 1.02, 1.005)),
        ("50%", "25%"),
    ),
    "streaming_llm_sinks": Ablation(
        "tokens kept from the prompt's start",
        "Chelsea, appendix C.1 (4)",
        tuple(f"streaming_llm:sinks={sinks}" for sinks in (0, 4, 16, 64)),
    ),
}
