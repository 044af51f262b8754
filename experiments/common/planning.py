"""What the real TPU compiler says of a model's programs on a pod that is not here."""

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
from experiments.common import ROOT, prefill_costs, settings
from experiments.common.compiled import Collective, collectives
from kvjax.registry import PolicyChoice
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
    """What a plan is for."""

    context_tokens: int
    max_new_tokens: int
    batch: int  # over all groups
    streaming: bool
    prefill_chunk: int
    compiled_layers: int | None
    mesh_data: int
    mesh_sequence: int | None


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiler says of one device's part of a program."""

    arguments: int = 0  # bytes
    temporaries: int = 0  # bytes
    collectives: tuple[Collective, ...] = ()
    seconds: float = 0.0  # to compile
    problem: str | None = None  # the compiler's words, where it refuses
    results: int = 0  # bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """A setting on a topology."""

    topology: str
    setting: PolicyChoice
    batch: int
    programs: dict[str, Program]
    parameter_bytes: int  # per device
    cache_bytes: int  # per device
    read_bytes: int  # per device and decoding step, of the caches
    flops: int  # per device and decoding step
    compiled_layers: int  # of the decoding program; what it says of all layers follows from it
    largest: int | None = None  # batch that fits, and was compiled; None where that was not asked
    held_bytes: int = 0  # per device, between the programs of exact prefill: the residual stream, keys and values

    @property
    def chip(self) -> dict[str, float]:
        return chip(self.topology)

    @property
    def decode(self) -> Program:
        return self.programs[DECODING]

    @property
    def prefill_temporaries(self) -> int:
        """Bytes of the fullest program that reads prompts, with what is held between them."""
        return self.held_bytes + max(one.temporaries for name, one in self.programs.items() if name != DECODING)

    @property
    def used(self) -> int:
        """Bytes of the fullest program on every device: decoding, or prefill beside the caches and weights."""
        prefill = self.parameter_bytes + self.cache_bytes + self.prefill_temporaries
        return max(self.decode.arguments + self.decode.temporaries, prefill)

    @property
    def problem(self) -> str | None:
        """Why it cannot be; None where it can."""
        refused = [f"{name}: {program.problem}" for name, program in self.programs.items() if program.problem]
        if refused:
            return "; ".join(refused)
        memory = self.chip["memory_gb"] * 1e9
        return None if self.used <= memory else f"{self.used / 1e9:.1f} GB do not fit in {memory / 1e9:.0f} GB"

    @property
    def ms_per_token(self) -> float:
        """What the memory's bandwidth and the matrix units allow at best."""
        reading = (self.parameter_bytes + self.read_bytes) / (1e9 * self.chip["bandwidth_gb_s"])
        return 1e3 * max(reading, self.flops / (1e12 * self.chip["bfloat16_tflops"]))


def chip(topology: str) -> dict[str, float]:
    """What is published of a topology's chips."""
    return CHIPS[topology.partition(":")[0]]


def plan(config: LlamaConfig, topology: str, setting: PolicyChoice, sizes: Sizes) -> Plan:
    """Compiles a setting's programs for a topology.

    Raises:
        ValueError: as `mesh_on`.
    """
    mesh = mesh_on(config, topology, sizes)
    model = abstract_model(config, mesh)
    made_for: dict[str, Any] = {"batch": sizes.batch, "max_prompt_tokens": sizes.context_tokens}
    made_for |= {"max_new_tokens": sizes.max_new_tokens, "streaming": sizes.streaming}
    spec = cache_specs(model, **made_for)[0]
    policy = settings.fitted(setting, spec, sizes.context_tokens + sizes.max_new_tokens)

    def generator_of(model: Llama) -> Generator:
        return Generator(model, policy, **made_for, prefill_chunk=sizes.prefill_chunk)

    generator = generator_of(model)
    state = lowering.abstract_state(jax.eval_shape(generator.init_state), mesh)

    def through(layers: int) -> dict[str, Program]:
        """The programs that go through so many layers."""
        few = generator_of(abstract_model(of_layers(config, layers), mesh))
        begun = lowering.abstract_state(jax.eval_shape(few.init_state), mesh)
        lowered = {DECODING: lowering.lower_decode(few, begun)}
        if few.streaming:
            lowered["reading"], *_, lowered["compaction"] = lowering.lower_append(few, begun)
        return {name: compiled(program) for name, program in lowered.items()}

    count = min(config.layers, sizes.compiled_layers or config.layers)
    programs = through(count)
    if count < config.layers:
        fewer, steps = through(count // 2), (config.layers - count) / (count - count // 2)
        programs = {name: on_a_line(fewer[name], programs[name], steps) for name in programs}
    if not generator.streaming:
        reading, compression = lowering.lower_prefill(generator, sizes.context_tokens)
        programs |= {"reading": compiled(reading), "compression": compiled(compression)}
    return Plan(
        topology,
        setting,
        sizes.batch,
        programs,
        parameter_bytes=part_bytes(model),
        cache_bytes=part_bytes(state.layers),
        # Blocks that a query recalls may all lie on one device.
        read_bytes=sum(map(kvjax.read_bytes, part(state.layers))),
        flops=2 * sizes.batch * sum(leaf.size for leaf in jax.tree.leaves(model)) // mesh.size,
        compiled_layers=count,
        held_bytes=0 if generator.streaming else programs["reading"].results,
    )


def mesh_on(config: LlamaConfig, topology: str, sizes: Sizes) -> jax.sharding.Mesh:
    """The mesh of a topology's chips.

    Raises:
        ValueError: for a chip that is not known, or a model that the topology's chips do not divide.
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


def reading_costs(config: LlamaConfig, topology: str, sizes: Sizes) -> list[prefill_costs.Cost]:
    """What reading prompts exactly costs a chip at least, in ways of which the last is taken."""
    mesh = mesh_on(config, topology, sizes)
    return prefill_costs.ways(
        abstract_model(config, mesh), mesh, sizes.batch, sizes.context_tokens, sizes.prefill_chunk
    )


def largest(config: LlamaConfig, topology: str, setting: PolicyChoice, sizes: Sizes) -> Plan:
    """The plan, and the largest batch that fits: what a row costs follows from two batches, and the compiler is asked
    about the result."""
    single, double = (
        plan(config, topology, setting, dataclasses.replace(sizes, batch=count * sizes.batch)) for count in (1, 2)
    )
    if single.problem or double.decode.problem or double.used <= single.used:
        return dataclasses.replace(single, largest=0) if single.problem else single
    per_row = (double.used - single.used) / single.batch
    rows = int(single.batch + (single.chip["memory_gb"] * 1e9 - single.used) // per_row)
    rows -= rows % sizes.mesh_data
    full = plan(config, topology, setting, dataclasses.replace(sizes, batch=rows))
    return dataclasses.replace(single, largest=0 if full.problem else rows)


def of_layers(config: LlamaConfig, layers: int) -> LlamaConfig:
    """The config of a model with the first layers alone."""
    return dataclasses.replace(config, layers=layers, windows=config.windows[:layers])


def abstract_model(config: LlamaConfig, mesh: jax.sharding.Mesh) -> Llama:
    """A bfloat16 model without values, on a mesh."""
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    place = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
    return jax.tree.map(place, model, parameter_shardings(model, config, mesh))


def on_a_line(few: Program, more: Program, steps: float) -> Program:
    """What follows for a program with so many times more layers again than the second has over the first."""
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
    """What the compiler says of a program; an oversized one is no error."""
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
    """One device's part of abstract arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), tree)


def part_bytes(tree: Any) -> int:
    """Bytes of one device's part of abstract arrays."""
    return kvjax.cache_bytes(part(tree)).device
