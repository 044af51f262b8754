"""What `experiments.all` runs: every experiment, with what it is asked for in each profile."""

import dataclasses
from collections.abc import Mapping

from experiments.common import choices
from experiments.common.tasks import ruler

PROFILES = {
    "quick": "every experiment's --quick: that everything works",
    "cpu": "two cores, some hours",
    "h200": "one H200, some hours",
}


# Flags of `experiments.all`: which flag of an experiment each is, and what stands for it where it is not known.
NEEDS = {"longbench": ("data", "DIRECTORY"), "kvpress_python": ("kvpress_python", "PYTHON")}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of an experiment.

    Attributes:
        experiment: its module.
        what: flags that make this run what it is, in every profile.
        cpu, h200: flags of a profile.
        loads_model: whether --model means anything to it.
        needs: what only a user can name, without which it is left out: a name of `NEEDS`.
    """

    experiment: str
    what: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    h200: tuple[str, ...] = ()
    loads_model: bool = True
    needs: str | None = None

    def arguments(self, profile: str, given: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Its flags.

        Args:
            given: what is needed, by name; placeholders where it is not given.
        """
        own = self.what + {"quick": ("--quick",), "cpu": self.cpu, "h200": self.h200}[profile]
        if self.needs is None:
            return own
        flag, placeholder = NEEDS[self.needs]
        return (*own, f"--{flag}={placeholder if given is None else given[self.needs]}")


def _each(flag: str, *values: str | int) -> tuple[str, ...]:
    return tuple(f"--{flag}={value}" for value in values)


_SWEPT = _each("budget", *choices.SWEPT)
# What the shipped language model was trained on.
_NEEDLE_TASKS = _each("task", *ruler.NEEDLE_TASKS)
_LONG = _each("context_tokens", 16384, 32768, 65536, 131072)
_PAPERS_LINES = (
    *_each("policy", "exact", "streaming_llm", "h2o", "clustergen:variant=paper,recent=64", "clustergen:recent=64"),
    *_each("budget", "65%", "58%", "50%"),
    "--question=seen",
)
_SINGLE_LAYER = (
    "--stream=recorded",
    *_each("policy", "uniform", f"{choices.STUDIED},block_size=256", "balancekv_reference", "balancekv"),
    *_each("budget", *choices.HALVINGS),
)
_NEEDLES = _each(
    "policy",
    "exact",
    "balancekv_reference:needles=64",
    "balancekv_reference",
    "uniform",
    "snapkv",
    "pyramidkv",
    "streaming_llm",
    "cam",
    "chelsea:slope=None",
    "chelsea",
    "clusterkv_paper",
    "clusterkv",
    "clusterkv:cluster_tokens=16,residual=False",
    "h2o",
    "h2o:average=True",
    "quest",
    "infinigen",
    "clustergen:variant=paper,recent=64",
    "subgen",
    "balancekv",
)
_LONGBENCH = (
    *_each(
        "policy",
        "exact",
        "streaming_llm",
        "snapkv",
        "pyramidkv",
        "cam",
        "uniform",
        "quest",
        "infinigen",
        "clustergen:variant=paper",
        "subgen",
        "balancekv_reference",
        "balancekv",
        "chelsea:slope=None",
        "chelsea",
        "clusterkv_paper",
        "clusterkv",
    ),
    *_each("budget", "20%", "25%"),
)
_UNGROUPED = _each("policy", "cam", "chelsea:slope=None", "clusterkv:residual=False")
_HOSTED = _each(
    "policy", "clusterkv:residual=False", *(f"clusterkv:residual=False,host_steps={steps}" for steps in (0, 1, 2))
)
# Of the needle tasks those that tell methods apart. Shares of layers were chosen with seed 40.
_SHARES = "shares=(0.35,3.2,0.35,0.1)"
_PEERS = (
    *_each("task", "niah_single_3", "niah_multikey_1", "niah_multikey_3", "niah_multivalue"),
    *_each("press", "KVzip", "LeverageScore"),
    *_each("budget", "25%", "12.5% of the text"),
    *_each(
        "policy",
        "exact",
        "leverage_scores",
        f"leverage_scores:{_SHARES}",
        f"leverage_scores:{_SHARES},storage=int8",
        f"kvzip:head_floor=0.0,{_SHARES}@25%",
        "clustergen@25%",
        "clustergen:storage=int8@25%",
        "subgen@25%",
    ),
)

JOBS = {
    # Every policy on every task.
    "line_retrieval": Job(
        "line_retrieval",
        cpu=("--documents=50", "--seed=10", *_SWEPT),
        h200=("--documents=500", "--seed=10", "--context_tokens=4096", "--question=unseen", "--question=seen", *_SWEPT),
    ),
    "ruler": Job(
        "ruler",
        cpu=("--documents=20", "--seed=10", *_NEEDLE_TASKS, *_SWEPT),
        h200=("--documents=200", "--seed=10", "--context_tokens=8192", *_SWEPT),
    ),
    "needle_in_haystack": Job(
        "needle_in_haystack",
        (*_NEEDLES, "--budget=25%"),
        cpu=("--documents=3",),
        h200=(*_each("context_tokens", 1024, 2048, 4096, 8192), "--documents=10"),
    ),
    "code_completion": Job(
        "code_completion", cpu=("--documents=20", *_SWEPT), h200=("--documents=500", "--context_tokens=8192", *_SWEPT)
    ),
    "perplexity": Job(
        "perplexity",
        ("--form=per_position",),
        cpu=("--position=2015", *_SWEPT),
        h200=("--documents=100", "--context_tokens=8192", *_SWEPT),
    ),
    "perplexity_accumulating": Job(
        "perplexity",
        ("--form=accumulating",),
        cpu=_SWEPT,
        h200=("--documents=100", "--context_tokens=8192", *_SWEPT),
    ),
    "longbench": Job("longbench", _LONGBENCH, needs="longbench"),
    "longbench_e": Job("longbench", ("--e", *_LONGBENCH), needs="longbench"),
    "peers": Job("peers", _PEERS, cpu=("--seed=50",), h200=("--seed=50", "--documents=50"), needs="kvpress_python"),
    # The papers' figures.
    "clusterability": Job("clusterability"),
    "line_retrieval_subgen": Job(
        "line_retrieval",
        _PAPERS_LINES,
        cpu=("--documents=50", "--seed=10", *_each("context_tokens", 2048, 4096)),
        h200=("--documents=500", "--seed=10", *_each("context_tokens", 2048, 4096, 8192)),
    ),
    "attention_error_recorded": Job("attention_error", _SINGLE_LAYER, cpu=("--seeds=10",)),
    "calibrate_heads": Job("calibrate_heads"),
    **{
        f"ablations_{system}": Job(
            "ablations",
            _each("ablation", *(name for name, one in choices.ABLATIONS.items() if one.system == system)),
            h200=("--documents=500", "--seeds=20"),
        )
        for system in dict.fromkeys(one.system for one in choices.ABLATIONS.values())
    },
    "key_similarity": Job("key_similarity"),
    "recall_rate": Job("recall_rate", ("--stream=recorded",)),
    "latency": Job(
        "latency", cpu=("--context_tokens=4096",), h200=("--shape=llama-3.1-8b", *_LONG[:3]), loads_model=False
    ),
    # Caches of all policies do not fit side by side any more.
    "latency_long": Job(
        "latency",
        _each("policy", "streaming_llm", "balancekv_reference", "chelsea:slope=None", "clusterkv:residual=False"),
        cpu=("--context_tokens=16384",),
        h200=("--shape=llama-3.1-8b", *_LONG[3:]),
        loads_model=False,
    ),
    "latency_ungrouped": Job(
        "latency",
        _UNGROUPED,
        cpu=("--shape=small-ungrouped", "--context_tokens=4096"),
        h200=("--shape=llama-2-7b-32k", *_LONG[:3]),
        loads_model=False,
    ),
    "latency_chunk": Job(
        "latency",
        _each("policy", "chelsea:slope=None", "chelsea:slope=None,chunk=4096"),
        cpu=("--context_tokens=4096",),
        h200=("--shape=llama-3.1-8b", "--policy=chelsea:slope=None,chunk=16384", "--context_tokens=16384"),
        loads_model=False,
    ),
    "latency_host_memory": Job(
        "latency",
        _HOSTED,
        cpu=("--context_tokens=4096",),
        h200=("--shape=llama-3.1-8b", "--context_tokens=32768", "--budget=1024"),
        loads_model=False,
    ),
    # What they do not measure.
    "attention_error": Job("attention_error", cpu=("--budget=12.5%", "--norm=4"), loads_model=False),
    "attention_error_recall": Job("attention_error", ("--study=recall",), cpu=("--budget=12.5%", "--norm=4")),
    "calibrate_layers": Job("calibrate_layers", cpu=("--seed=40",)),
    "calibrate_skew": Job("calibrate_skew"),
    "decode_speed": Job("decode_speed", cpu=("--context_tokens=4096",), loads_model=False),
    "discrepancy": Job("discrepancy"),
    "guarantees": Job("guarantees"),
    "stream_geometry": Job("stream_geometry"),
    "stream_structures": Job("stream_structures", cpu=("--tokens=65536",), loads_model=False),
    "streaming_prefill": Job("streaming_prefill", cpu=("--context_tokens=16384",), loads_model=False),
    "subgen_rates": Job("subgen_rates", loads_model=False),
}
