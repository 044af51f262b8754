"""Compiles a model's programs for a TPU pod and reports memory, collectives and bounds of time."""

import dataclasses
import json
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

import kvjax
from experiments.common import ROOT, prefill_costs
from experiments.common.caches import Setting
from experiments.common.compiled import Collective, collectives
from experiments.common.shapes import first_layers, zero_scorer
from kvjax_models.generation import lowering
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import cache_specs
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import parameter_shardings

DECODING = "decoding"
CHIPS = json.loads((ROOT / "experiments" / "targets" / "tpus.json").read_text())["chips"]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a plan."""

    context_tokens: int
    max_new_tokens: int
    batch: int  # over all groups of devices
    streaming: bool
    prefill_chunk: int
    compiled_layers: int | None
    mesh_data: int
    mesh_sequence: int | None


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiler's report of one device's part of a program."""

    arguments: int = 0  # bytes
    temporaries: int = 0  # bytes
    collectives: tuple[Collective, ...] = ()
    seconds: float = 0.0  # to compile
    problem: str | None = None  # the compiler's error
    results: int = 0  # bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """A setting on a topology; bytes and operations are per device."""

    topology: str
    setting: Setting
    batch: int
    programs: dict[str, Program]
    parameter_bytes: int
    cache_bytes: int
    read_bytes: int  # of the caches, per decode step
    flops: int  # per decode step
    compiled_layers: int  # layers of the compiled decoding program; figures for all layers are extrapolated
    largest: int | None = None  # largest batch that fits; None if it was not requested
    held_bytes: int = 0  # residual stream, keys and values between the programs of exact prefill

    @property
    def chip(self) -> dict[str, float]:
        """Published figures of the chip."""
        return chip(self.topology)

    @property
    def decode(self) -> Program:
        """The program of decode steps."""
        return self.programs[DECODING]

    @property
    def prefill(self) -> Program:
        """The program that processes prompts."""
        return self.programs["append" if "append" in self.programs else "prefill"]

    @property
    def prefill_temporaries(self) -> int:
        """Temporary bytes of prefill, including arrays between its programs."""
        return self.held_bytes + max(one.temporaries for name, one in self.programs.items() if name != DECODING)

    @property
    def used(self) -> int:
        """Peak bytes of a device, in decoding or in prefill."""
        prefill = self.parameter_bytes + self.cache_bytes + self.prefill_temporaries
        return max(self.decode.arguments + self.decode.temporaries, prefill)

    @property
    def problem(self) -> str | None:
        """The reason why the plan is impossible; None if it is possible."""
        refused = [f"{name}: {program.problem}" for name, program in self.programs.items() if program.problem]
        if refused:
            return "; ".join(refused)
        memory = self.chip["memory_gb"] * 1e9
        return None if self.used <= memory else f"{self.used / 1e9:.1f} GB do not fit in {memory / 1e9:.0f} GB"

    @property
    def ms_per_token(self) -> float:
        """Lower bound of a decode step from memory bandwidth and matrix units."""
        reading = (self.parameter_bytes + self.read_bytes) / (1e9 * self.chip["bandwidth_gb_s"])
        return 1e3 * max(reading, self.flops / (1e12 * self.chip["bfloat16_tflops"]))


def chip(topology: str) -> dict[str, float]:
    """Returns the published figures of a topology's chips."""
    return CHIPS[topology.partition(":")[0]]


def plan(config: LlamaConfig, topology: str, setting: Setting, sizes: Sizes) -> Plan:
    """Compiles the programs of a setting for a topology.

    Args:
        config: configuration of the model.
        topology: topology, as libtpu spells it.
        setting: settings of the cache.
        sizes: the sizes.

    Returns:
        The plan.
    """
    mesh = mesh_on(config, topology, sizes)
    model = abstract_model(config, mesh)
    generator_sizes: dict[str, Any] = {"batch": sizes.batch, "max_prompt_tokens": sizes.context_tokens}
    generator_sizes |= {"max_new_tokens": sizes.max_new_tokens, "streaming": sizes.streaming}
    spec = cache_specs(model, **generator_sizes)[0]
    policy = setting.fit(spec, sizes.context_tokens + sizes.max_new_tokens)

    def generator_of(model: Llama) -> Generator:
        scorer = jax.eval_shape(lambda: zero_scorer(model.config))
        return Generator(model, policy, **generator_sizes, prefill_chunk=sizes.prefill_chunk, scorer=scorer)

    generator = generator_of(model)
    state = lowering.abstract_state(jax.eval_shape(generator.init_state), mesh)

    def through(layers: int) -> dict[str, Program]:
        """Compiles the programs of the first `layers` layers."""
        few = generator_of(abstract_model(first_layers(config, layers), mesh))
        begun = lowering.abstract_state(jax.eval_shape(few.init_state), mesh)
        lowered = {DECODING: lowering.lower_decode(few, begun)}
        if few.streaming:
            lowered["append"], *_, lowered["compaction"] = lowering.lower_append(few, begun)
        return {name: compiled(program) for name, program in lowered.items()}

    count = min(config.layers, sizes.compiled_layers or config.layers)
    programs = through(count)
    if count < config.layers:
        fewer, steps = through(count // 2), (config.layers - count) / (count - count // 2)
        programs = {name: extrapolate(fewer[name], programs[name], steps) for name in programs}
    if not generator.streaming:
        prefill, compression = lowering.lower_prefill(generator, sizes.context_tokens)
        programs |= {"prefill": compiled(prefill), "compression": compiled(compression)}
    return Plan(
        topology,
        setting,
        sizes.batch,
        programs,
        parameter_bytes=part_bytes(model),
        cache_bytes=part_bytes(state.layers),
        # All blocks that a query selects may be on one device.
        read_bytes=sum(map(kvjax.read_bytes, part(state.layers))),
        flops=2 * sizes.batch * sum(leaf.size for leaf in jax.tree.leaves(model)) // mesh.size,
        compiled_layers=count,
        held_bytes=0 if generator.streaming else programs["prefill"].results,
    )


def mesh_on(config: LlamaConfig, topology: str, sizes: Sizes) -> jax.sharding.Mesh:
    """Returns the mesh of a topology's chips.

    Args:
        config: configuration of the model.
        topology: the topology.
        sizes: sizes of the mesh axes.

    Returns:
        The mesh.

    Raises:
        ValueError: if the chip is unknown, or the chips cannot share the model.
    """
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise ValueError(f"--topology={topology}: known chips are {', '.join(CHIPS)}")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return kvjax.make_mesh(
        config.kv_heads,
        data=sizes.mesh_data,
        tensor=len(devices) // sizes.mesh_data,
        sequence=sizes.mesh_sequence,
        devices=devices,
    )


def prefill_bounds(config: LlamaConfig, topology: str, sizes: Sizes) -> list[prefill_costs.Cost]:
    """Returns lower bounds of exact prefill per chip; the last way is the one that the library uses."""
    mesh = mesh_on(config, topology, sizes)
    return prefill_costs.ways(
        abstract_model(config, mesh), mesh, sizes.batch, sizes.context_tokens, sizes.prefill_chunk
    )


def largest(config: LlamaConfig, topology: str, setting: Setting, sizes: Sizes) -> Plan:
    """Returns a plan with the largest batch that fits.

    The batch is extrapolated from two batches and compiled. If it does not fit, bisection finds one that does.

    Args:
        config: configuration of the model.
        topology: the topology.
        setting: settings of the cache.
        sizes: the sizes.

    Returns:
        The plan.
    """

    def plan_of(batch: int) -> Plan:
        return plan(config, topology, setting, dataclasses.replace(sizes, batch=batch))

    single = plan_of(sizes.batch)
    if single.problem:
        return dataclasses.replace(single, largest=0)
    double = plan_of(2 * sizes.batch)
    per_row = max(double.used - single.used, double.cache_bytes - single.cache_bytes) / sizes.batch
    rows = sizes.batch + (single.chip["memory_gb"] * 1e9 - single.used) / per_row
    groups = sizes.mesh_data
    fits, high = sizes.batch // groups, int(rows) // groups
    if high == fits or plan_of(high * groups).problem is None:
        return dataclasses.replace(single, largest=high * groups)
    while high - fits > 1:
        middle = (fits + high) // 2
        if plan_of(middle * groups).problem:
            high = middle
        else:
            fits = middle
    return dataclasses.replace(single, largest=fits * groups)


def abstract_model(config: LlamaConfig, mesh: jax.sharding.Mesh) -> Llama:
    """Returns a bfloat16 model without values, on a mesh."""
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))

    def place(x: Any, sharding: jax.sharding.Sharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, model, parameter_shardings(model, config, mesh))


def extrapolate(few: Program, more: Program, steps: float) -> Program:
    """Extrapolates linearly from two programs.

    Args:
        few: program with fewer layers.
        more: program with more layers.
        steps: how many times the difference of layers is added to the second.

    Returns:
        The program.
    """
    added = Counter(more.collectives) - Counter(few.collectives)
    again = [collective for collective, count in added.items() for _ in range(round(count * steps))]
    return Program(
        round(more.arguments + steps * (more.arguments - few.arguments)),
        max(more.temporaries, round(more.temporaries + steps * (more.temporaries - few.temporaries))),
        (*more.collectives, *again),
        few.seconds + more.seconds,
        more.problem or few.problem,
    )


def compiled(lowered: jax.stages.Lowered) -> Program:
    """Compiles a program; one that exceeds the memory is reported as a problem."""
    begin = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Program(seconds=time.perf_counter() - begin, problem=next(iter(str(error).splitlines())))
    memory = program.memory_analysis()
    assert memory is not None
    return Program(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        tuple(collectives(program.as_text() or "")),
        time.perf_counter() - begin,
        results=memory.output_size_in_bytes,
    )


def part(tree: Any) -> Any:
    """Returns one device's part of abstract arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), tree)


def part_bytes(tree: Any) -> int:
    """Returns the bytes of one device's part of abstract arrays."""
    return kvjax.cache_bytes(part(tree)).device
