"""The choices of each system that ablations vary, one at a time."""

from typing import NamedTuple

# In a policy's settings: the folder of the files that `experiments.calibrate_heads` writes.
CALIBRATED = "CALIBRATED"


class Ablation(NamedTuple):
    """Settings that differ in one choice of a system."""

    system: str
    choice: str
    source: str  # where the papers vary it
    policies: tuple[str, ...]
    budgets: tuple[str, ...] = ("20%",)


# Of exact's bytes, as many as there are to choose from.
SWEPT = ("5%", "10%", "12.5%", "20%", "25%", "50%", "80%")
# BalanceKV's released code can only halve: as many bytes as one, two and three halvings take with the window beside.
HALVINGS = ("52.5%", "28%", "15.5%")
# As it runs in the notebook of BalanceKV's single-layer study; its own default, of the other experiments, is 1.
STUDIED = "balancekv_reference:temperature=0.1"

ABLATIONS = {
    "kept": Ablation(
        "kept",
        "how much is kept, of every system",
        "Chelsea, Figure 4 (12.5 to 80%); BalanceKV, section 4.1 and Figure 1",
        (
            "exact",
            "uniform",
            "streaming_llm",
            "h2o",
            "h2o:average=True",
            "snapkv",
            "pyramidkv",
            "cam",
            "clustergen:variant=paper",
            "subgen",
            "balancekv_reference",
            "balancekv",
            "chelsea:slope=None",
            "chelsea",
            "quest",
            "infinigen",
            "clusterkv_paper",
            "clusterkv:residual=False",
            "clusterkv",
        ),
        SWEPT,
    ),
    "chelsea_chunk": Ablation(
        "chelsea",
        "entries among which a partner is looked for; 4,096: all",
        "Chelsea, Table 4",
        tuple(f"chelsea:slope=None,chunk={chunk}" for chunk in (16, 64, 256, 4096)),
    ),
    "chelsea_outlier_heads": Ablation(
        "chelsea",
        "heads that keep everything, at equal slots: none, by the paper's rule, by the error of attention",
        "Chelsea, Tables 5 and 11",
        (
            "chelsea:slope=None",
            f"chelsea:slope=None,heads={CALIBRATED}/heads_share.json",
            f"chelsea:slope=None,heads={CALIBRATED}/heads_error.json",
        ),
        ("20%", "50%"),
    ),
    "chelsea_schedule": Ablation(
        "chelsea",
        "the share of entries merged per step: the paper's three, constant, as many as can be",
        "Chelsea, appendix C.2",
        (
            *(f"chelsea:slope=None,schedule={name}" for name in ("llama-2", "llama-3", "qwen")),
            "chelsea:slope=None,first=0.25,decay=0",
            "chelsea:slope=None,first=0.5,decay=0",
        ),
    ),
    "chelsea_sinks": Ablation(
        "chelsea",
        "tokens kept from the prompt's start",
        "Chelsea, section 7.1 (16)",
        tuple(f"chelsea:slope=None,sinks={sinks}" for sinks in (0, 4, 16, 64)),
    ),
    "chelsea_recent": Ablation(
        "chelsea",
        "tokens kept from the prompt's end",
        "Chelsea, section 7.1 (64)",
        tuple(f"chelsea:slope=None,recent={recent}" for recent in (0, 16, 64, 256)),
    ),
    "chelsea_values": Ablation(
        "chelsea",
        "what stands for tokens that are merged: their means, means with a slope, one of them",
        "ours",
        ("chelsea:slope=None", "chelsea", "chelsea:joins=drop"),
    ),
    "balancekv_batch": Ablation(
        "balancekv",
        "tokens that are balanced against one another, and the share of them that is kept",
        "BalanceKV, Figure 3 and appendix B.1",
        (
            "uniform",
            *(
                f"{policy}block_size={size}"
                for policy in (f"{STUDIED},", "balancekv:walk=streaming,", "balancekv:walk=pairs,")
                for size in (64, 128, 256)
            ),
        ),
        HALVINGS,
    ),
    "balancekv_needles": Ablation(
        "balancekv",
        "tokens unlike the others, kept whatever the walk says",
        "BalanceKV, section 4.3",
        (
            "balancekv_reference",
            "balancekv_reference:needles=64",
            "balancekv_reference:needles=64,needles_inside=True",
        ),
        # With room for the needles beside as many halvings of all three: otherwise those with needles halve once more.
        ("60%", "35%"),
    ),
    "clusterkv_clusters": Ablation(
        "clusterkv",
        "tokens per cluster, against pages of 16",
        "ClusterKV, Figure 11b",
        (*(f"clusterkv:residual=False,cluster_tokens={tokens}" for tokens in (320, 160, 80, 40, 20)), "quest"),
        ("25%", "12.5%"),
    ),
    "clusterkv_selection": Ablation(
        "clusterkv",
        "the paper's system; clusters per query head or per group of heads, those that are not read left out or means",
        "ours",
        (
            "clusterkv_paper",
            *(
                f"clusterkv:select={select},residual={residual}"
                for select in ("query_head", "group")
                for residual in (False, True)
            ),
        ),
        ("25%", "12.5%"),
    ),
    "clustergen_recent": Ablation(
        "subgen",
        "how much of the budget is the newest tokens",
        "SubGen, section 3.2; ClusterGen, section 4.1 (the better of 2,048 and 3,072 of 5,000 to 9,000)",
        tuple(f"clustergen:variant=paper,recent={recent}" for recent in (16, 64, 256)),
        ("50%", "25%"),
    ),
    "subgen_parameters": Ablation(
        "subgen",
        "samples per cluster, and pairs sampled by value norm",
        "SubGen, Theorem 1 (t and s)",
        (
            *(f"subgen:variant=mean_value,per_cluster={samples}" for samples in (0, 1, 2, 4, 8)),
            *(f"subgen:variant=paper,per_cluster={samples}" for samples in (1, 2, 4)),
            *(f"subgen:variant=self_normalised,samples={samples}" for samples in (64, 128)),
        ),
        ("25%",),
    ),
    "subgen_growth": Ablation(
        "subgen",
        "how fast the clusters' radius grows, and whether they are spread",
        "ours",
        tuple(f"subgen:growth={growth},spread={spread}" for growth in (1.1, 1.02, 1.005) for spread in (True, False)),
        ("50%", "25%"),
    ),
    "streaming_llm_sinks": Ablation(
        "subgen",
        "tokens kept from the prompt's start",
        "Chelsea, appendix C.1 (4)",
        tuple(f"streaming_llm:sinks={sinks}" for sinks in (0, 4, 16, 64)),
    ),
}
