"""What `experiments.all` runs: every experiment, with what it is asked for in each profile."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments import (
    ablations,
    attention_error,
    calibrate_heads,
    calibrate_layers,
    calibrate_skew,
    clusterability,
    code_completion,
    decode_speed,
    discrepancy,
    guarantees,
    key_similarity,
    latency,
    line_retrieval,
    longbench,
    longbench_v2,
    low_precision,
    needle_in_haystack,
    peers,
    perplexity,
    recall_rate,
    ruler,
    storage_forms,
    stream_geometry,
    stream_structures,
    streaming_prefill,
    subgen_rates,
    throughput,
)
from experiments.common.options import LANGUAGE_CHECKPOINT, Experiment, Run
from experiments.common.suites import ABLATIONS, SUITES, SWEPT
from experiments.common.tasks.ruler import NEEDLE_TASKS

PROFILES = {
    "quick": "every experiment's --quick: that everything works",
    "cpu": "two cores, some hours",
    "h200": "one H200, some hours",
}

# Flags of `experiments.all`: which option of an experiment each is, and what stands for it where it is not known.
NEEDS = {
    "longbench": ("data", "DIRECTORY"),
    "longbench_v2": ("data", "FILE"),
    "kvpress_python": ("kvpress_python", "PYTHON"),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of an experiment.

    Attributes:
        of: the experiment.
        what: options that make this run what it is, in every profile.
        cpu, h200: options of a profile.
        loads_model: whether --model means anything to it.
        needs: what only a user can name, without which it is left out: a name of `NEEDS`.
    """

    of: Experiment
    what: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cpu: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    h200: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loads_model: bool = True
    needs: str | None = None

    @property
    def experiment(self) -> str:
        """Its name."""
        return self.of.name

    def given(self, profile: str, known: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The options that are not defaults.

        Args:
            known: what is needed, by name; placeholders where it is not given.
        """
        own = {**self.what, **{"quick": {"quick": True}, "cpu": self.cpu, "h200": self.h200}[profile]}
        if self.needs is not None:
            option, placeholder = NEEDS[self.needs]
            own[option] = placeholder if known is None else known[self.needs]
        return own

    def options(self, given: Mapping[str, Any]) -> Run:
        """Options of its experiment; in a quick run others are small."""
        return self.of.options.small(**given) if given.get("quick") else self.of.options(**given)

    def arguments(self, profile: str, known: Mapping[str, str] | None = None) -> list[str]:
        """The same as flags."""
        return as_flags(self.given(profile, known))


def as_flags(given: Mapping[str, Any]) -> list[str]:
    """Options as a user types them."""
    words = []
    for name, value in given.items():
        if value is True:
            words.append(f"--{name}")
        else:
            words += [f"--{name}={one}" for one in (value if isinstance(value, tuple) else (value,))]
    return words


def _suite(name: str) -> dict[str, Any]:
    return {"policy": SUITES[name].policies, "budget": SUITES[name].budgets}


def _policies(name: str) -> dict[str, Any]:
    return {"policy": SUITES[name].policies}


_SWEPT = {"budget": SWEPT}
# Settings were chosen on seeds 0 to 9.
_LATER = {"seed": 10}
_MANY = {"documents": 500, **_LATER}
_LLAMA = {"shape": "llama-3.1-8b"}
_LONG, _LONGEST = (16384, 32768, 65536), 131072
_SMALL = {"budget": ("12.5%",), "norm": (4,)}


def _latency(what: Mapping[str, Any], cpu: int, h200: tuple[int, ...], **more: Any) -> Job:
    """At so many tokens of the prompt on a CPU, and on a device, which may be asked for more, with a large model."""
    on_device = {**more, **_LLAMA, "context_tokens": h200}
    return Job(latency.EXPERIMENT, what, {"context_tokens": (cpu,)}, on_device, loads_model=False)


JOBS = {
    # Every policy on every task.
    "line_retrieval": Job(
        line_retrieval.EXPERIMENT,
        cpu={"documents": 50, **_LATER, **_SWEPT},
        h200={**_MANY, "context_tokens": (4096,), "question": ("unseen", "seen"), **_SWEPT},
    ),
    "ruler": Job(
        ruler.EXPERIMENT,
        # What the shipped language model was trained on.
        cpu={"documents": 20, **_LATER, "task": tuple(NEEDLE_TASKS), **_SWEPT},
        h200={"documents": 200, **_LATER, "context_tokens": (8192,), **_SWEPT},
    ),
    # Widths of storage beside one another, at an eighth of a bfloat16 cache.
    "few_bits": Job(
        ruler.EXPERIMENT,
        {"task": tuple(NEEDLE_TASKS), **_LATER, **_suite("few bits")},
        cpu={"documents": 25, "seed": 50},
        h200={"documents": 200, "seed": 50, "context_tokens": (8192,)},
    ),
    "few_bits_lines": Job(
        line_retrieval.EXPERIMENT,
        _suite("few bits, lines"),
        cpu={"documents": 100, "seed": 50},
        h200={**_MANY, "seed": 50},
    ),
    "few_bits_perplexity": Job(
        perplexity.EXPERIMENT,
        {"form": ("per_position",), **_suite("few bits")},
        cpu={"position": (2015,), "documents": 100, "seed": 50},
        h200={"documents": 100, "context_tokens": 8192, "seed": 50},
    ),
    "few_bits_decoding": Job(
        decode_speed.EXPERIMENT, _suite("few bits, decoding"), cpu={"context_tokens": (32768,)}, loads_model=False
    ),
    "low_precision": Job(low_precision.EXPERIMENT),
    "storage_forms": Job(storage_forms.EXPERIMENT),
    "storage_forms_language": Job(
        storage_forms.EXPERIMENT, {"model": LANGUAGE_CHECKPOINT, "recorded_tokens": 1900}, cpu={}, loads_model=False
    ),
    "needle_in_haystack": Job(
        needle_in_haystack.EXPERIMENT,
        _suite("needles"),
        cpu={"documents": 3},
        h200={"context_tokens": (1024, 2048, 4096, 8192), "documents": 10},
    ),
    # Few policies, with documents enough at every depth to draw.
    "needle_map": Job(
        needle_in_haystack.EXPERIMENT,
        {**_suite("needle, map"), "seed": 50},
        cpu={"documents": 10},
        h200={"context_tokens": (1024, 2048, 4096, 8192), "documents": 10},
    ),
    "code_completion": Job(
        code_completion.EXPERIMENT,
        cpu={"documents": 20, **_SWEPT},
        h200={"documents": 500, "context_tokens": (8192,), **_SWEPT},
    ),
    "perplexity": Job(
        perplexity.EXPERIMENT,
        {"form": ("per_position",)},
        cpu={"position": (2015,), **_SWEPT},
        h200={"documents": 100, "context_tokens": 8192, **_SWEPT},
    ),
    "perplexity_accumulating": Job(
        perplexity.EXPERIMENT,
        {"form": ("accumulating",)},
        cpu=_SWEPT,
        h200={"documents": 100, "context_tokens": 8192, **_SWEPT},
    ),
    "longbench": Job(longbench.EXPERIMENT, _suite("longbench"), needs="longbench"),
    "longbench_v2": Job(longbench_v2.EXPERIMENT, _suite("longbench"), needs="longbench_v2"),
    "longbench_e": Job(longbench.EXPERIMENT, {"e": True, **_suite("longbench")}, needs="longbench"),
    "peers": Job(
        peers.EXPERIMENT,
        {
            # Of the needle tasks those that tell methods apart.
            "task": ("niah_single_3", "niah_multikey_1", "niah_multikey_3", "niah_multivalue"),
            "press": ("KVzip", "LeverageScore"),
            "budget": ("25%", "12.5% of the text"),
            **_policies("peers"),
        },
        cpu={"seed": 50},
        h200={"seed": 50, "documents": 50},
        needs="kvpress_python",
    ),
    "peers_presses": Job(
        peers.EXPERIMENT,
        {"task": tuple(NEEDLE_TASKS), "seeds": 1, **_suite("peers, all presses")},
        cpu={"seed": 50},
        h200={"seed": 50, "documents": 100},
        needs="kvpress_python",
    ),
    # The papers' figures.
    "clusterability": Job(clusterability.EXPERIMENT),
    "line_retrieval_subgen": Job(
        line_retrieval.EXPERIMENT,
        {**_suite("lines of SubGen's paper"), "question": ("seen",)},
        cpu={"documents": 50, **_LATER, "context_tokens": (2048, 4096)},
        h200={**_MANY, "context_tokens": (2048, 4096, 8192)},
    ),
    "attention_error_recorded": Job(
        attention_error.EXPERIMENT, {"stream": ("recorded",), **_suite("single layer")}, cpu={"seeds": 10}
    ),
    "calibrate_heads": Job(calibrate_heads.EXPERIMENT),
    **{
        f"ablations_{system}": Job(
            ablations.EXPERIMENT,
            {"ablation": tuple(name for name, one in ABLATIONS.items() if one.system == system)},
            h200={"documents": 500, "seeds": 20},
        )
        for system in dict.fromkeys(one.system for one in ABLATIONS.values())
    },
    "key_similarity": Job(key_similarity.EXPERIMENT),
    "recall_rate": Job(recall_rate.EXPERIMENT, {"stream": ("recorded",)}),
    "latency": _latency({}, 4096, _LONG),
    # Caches of all policies do not fit side by side any more.
    "latency_long": _latency(_policies("latency, long"), 16384, (_LONGEST,)),
    # Of each system the best: what half an hour on a device has time for.
    "latency_best": _latency(_policies("latency, best"), 4096, (32768,)),
    "latency_best_long": _latency(_policies("latency, best"), 16384, (_LONGEST,)),
    # On the CPU few layers, and as many heads stored as asked: what decoding reads is then mostly caches, as it is in
    # large models on devices.
    "throughput": Job(
        throughput.EXPERIMENT,
        cpu={"shape": "small-ungrouped", "layers": 2, "context_tokens": (2048,), "exact_rows": (4,)},
        h200={**_LLAMA, "context_tokens": (32768,), "exact_rows": (2,)},
        loads_model=False,
    ),
    "latency_ungrouped": Job(
        latency.EXPERIMENT,
        _policies("latency, ungrouped"),
        cpu={"shape": "small-ungrouped", "context_tokens": (4096,)},
        h200={"shape": "llama-2-7b-32k", "context_tokens": _LONG},
        loads_model=False,
    ),
    "latency_chunk": _latency(
        {"policy": ("chelsea:slope=None", "chelsea:slope=None,chunk=4096")},
        4096,
        (16384,),
        **_policies("latency, chunks"),
    ),
    "latency_host_memory": _latency(_policies("latency, host memory"), 4096, (32768,), budget=("1024",)),
    # What they do not measure.
    "attention_error": Job(attention_error.EXPERIMENT, cpu=_SMALL, loads_model=False),
    "attention_error_recall": Job(attention_error.EXPERIMENT, {"study": "recall"}, cpu=_SMALL),
    "calibrate_layers": Job(calibrate_layers.EXPERIMENT, cpu={"seed": 40}),
    "calibrate_skew": Job(calibrate_skew.EXPERIMENT),
    "decode_speed": Job(decode_speed.EXPERIMENT, cpu={"context_tokens": (4096,)}, loads_model=False),
    "discrepancy": Job(discrepancy.EXPERIMENT),
    "guarantees": Job(guarantees.EXPERIMENT),
    "stream_geometry": Job(stream_geometry.EXPERIMENT),
    "stream_structures": Job(stream_structures.EXPERIMENT, cpu={"tokens": 65536}, loads_model=False),
    "streaming_prefill": Job(streaming_prefill.EXPERIMENT, cpu={"context_tokens": (16384,)}, loads_model=False),
    "subgen_rates": Job(subgen_rates.EXPERIMENT, loads_model=False),
}
