"""The stream structures by themselves: how fast they take in tokens, and a stream of a million tokens through each.

    python -m experiments.stream_structures

Speed is that of a block update of 8,192 tokens of dimension 128, next to what it is held against, timed in the same
run: the reservoir against its token-by-token definition, the cluster table and the tree against the products that they
cannot do without. The long stream goes through each structure in one `lax.scan`, which also sums exact attention for a
fixed set of queries; errors, bytes and soundness are read off on the way.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key
from tqdm import tqdm

import kvjax
from experiments.common import results, speed, streams
from experiments.common.driven import (
    CLUSTERS,
    HALVED,
    HEAD_DIM,
    STRUCTURES,
    SUB_BLOCK,
    update_reservoir,
    update_table,
    update_tree,
)
from experiments.common.options import Experiment, Run, one_of
from experiments.common.results import Row
from kvjax.structures import reservoir

NAME = "stream_structures"
BLOCK_TOKENS = 8192  # of one update, when speed is measured
SCAN_TOKENS = 4096  # of one update of the long stream


@dataclasses.dataclass(frozen=True)
class Options(Run):
    """Options of this experiment."""

    stream: str = one_of("drift", streams.SYNTHETIC)  # the stream that goes through the structures
    norm: float = 4.0  # l2 norm of keys and queries
    repetitions: int = 7  # repetitions; the median is reported, with the extremes
    tokens: int = 2**20  # tokens of the long stream, a multiple of 4,096
    queries: int = 64  # queries whose attention is followed along the long stream

    QUICK: ClassVar[dict[str, Any]] = {"repetitions": 2, "tokens": 2**16}


def run(options: Options) -> list[Row]:
    """The rows of both studies."""
    return speeds(options) + long_streams(options, options.tokens // SCAN_TOKENS * SCAN_TOKENS)


# --- speed ---

Update = Callable[[Float[Array, "T D"], Float[Array, "T D"]], Any]


class Comparison(NamedTuple):
    """A block update, and what it is held against."""

    structure: str
    update: Update
    against: str
    other: Update


class Chain:
    """A structure that takes in one block after another, its buffers donated."""

    def __init__(self, update: Callable[..., Any], state: Any):
        self._update = jax.jit(update, donate_argnums=0)
        self._state = jax.tree.map(jnp.copy, state)  # buffers of its own, fit to be donated

    def __call__(self, keys: Float[Array, "T D"], values: Float[Array, "T D"]) -> Any:
        self._state = self._update(self._state, keys, values)
        return self._state


def comparisons(rng: Key[Array, ""]) -> list[Comparison]:
    states = {name: functools.partial(one.init, rng) for name, one in STRUCTURES.items()}

    def scan_tokens(state, keys, values):
        def step(state, token):
            return reservoir.extend(state, *(part[None] for part in token)), None

        return jax.lax.scan(step, state, (keys, values, jnp.sum(values**2, axis=1)))[0]

    leaves = BLOCK_TOKENS // (HALVED // 2)
    own = functools.partial(halving_products, leaves)
    one_by_one, table = Chain(scan_tokens, states["reservoir"]()), Chain(update_table, states["table"]())
    return [
        Comparison("reservoir", Chain(update_reservoir, states["reservoir"]()), "token by token", one_by_one),
        Comparison("table", table, "[T, D] x [D, M], [T, D] x [D, new]", table_products),
        Comparison("tree", Chain(update_tree, states["tree"]()), f"{leaves} x t x t x (D + D_v)", own),
    ]


@jax.jit
def table_products(keys: Float[Array, "T D"], values: Float[Array, "T D"]) -> tuple[Array, Array]:
    """Every token against M centres, and against as many new ones as its sub-block could open."""
    del values
    blocks = keys.reshape(-1, SUB_BLOCK, HEAD_DIM)
    return keys @ keys[:CLUSTERS].T, jnp.einsum("btd,bnd->btn", blocks, blocks)


@functools.partial(jax.jit, static_argnums=0)
def halving_products(halvings: int, keys: Float[Array, "T D"], values: Float[Array, "T D"]) -> Float[Array, "h t t"]:
    """The inner products of (key, value) within so many blocks of t, one product of width D + D_v a block."""
    blocks = jnp.concatenate([keys, values], axis=1).reshape(-1, HALVED, 2 * HEAD_DIM)
    return jax.lax.map(lambda number: blocks[number] @ blocks[number].T, jnp.arange(halvings) % len(blocks))


def speeds(options: Options) -> list[Row]:
    """Seconds of every update and of what it is held against, alternating; as rows and as a table."""
    count = (options.repetitions + 1) * BLOCK_TOKENS
    drawn = streams.synthetic(options.stream, [options.seed], count, 1, HEAD_DIM).scaled(options.norm)
    blocks = [jnp.asarray(part[0].reshape(-1, BLOCK_TOKENS, HEAD_DIM)) for part in (drawn.keys, drawn.values)]
    rows, lines = [], []
    for one in tqdm(comparisons(jax.random.key(options.seed)), desc="speed", leave=False):
        times = np.array(
            [[speed.timed(run, *block)[0] for run in (one.update, one.other)] for block in zip(*blocks, strict=True)]
        )
        own, other = times[1:].T  # the first compiles
        of: dict[str, Any] = {"stream": options.stream, "seed": options.seed, "n": options.repetitions}
        of |= {"policy": STRUCTURES[one.structure.partition(",")[0]].policy, "variant": one.structure}
        of |= {"against": one.against, "against_seconds": float(np.median(other))}
        took = float(np.median(own))
        rows.append(results.row(NAME, "synthetic", "update_seconds", took, context_tokens=BLOCK_TOKENS, **of))
        lines.append((one.structure, _range(1e3 * own), one.against, _range(1e3 * other), _range(own / other)))
    columns = ("structure", "ms [range]", "against", "ms [range]", "of its time [range]")
    title = f"Updates of {BLOCK_TOKENS} tokens of dimension {HEAD_DIM}, stream {options.stream}, norm {options.norm:g}"
    results.print_table(title, columns, lines)
    return rows


def _range(values: Float[np.ndarray, "n"]) -> str:
    return f"{np.median(values):.3g} [{values.min():.3g}, {values.max():.3g}]"


# --- long streams ---


class Followed(NamedTuple):
    """What is seen of a structure after every block."""

    error: Float[Array, "n Q"]  # |z - Attn| / |Attn| of every query; a sum that the structure lacks is exact
    not_a_number: Array  # [n] bool
    bytes: Array  # [n] int32


@functools.partial(jax.jit, static_argnames="name")
def follow(
    name: str,
    rng: Key[Array, ""],
    keys: Float[Array, "n T D"],
    values: Float[Array, "n T D"],
    queries: Float[Array, "Q D"],
) -> tuple[Any, Followed]:
    """The structure after n blocks, in one scan, and what was seen on the way."""
    structure = STRUCTURES[name]

    def step(carry, block):
        state, exact_num, exact_den = carry
        terms = streams.weighted_terms(queries, block[0])
        exact_num, exact_den = exact_num + terms @ block[1], exact_den + jnp.sum(terms, axis=1)
        state = structure.update(state, *block)
        num, den = structure.sums(state, queries)
        exact = exact_num / exact_den[:, None]
        estimate = (exact_num if num is None else num) / (exact_den if den is None else den)[:, None]
        seen = Followed(
            error=jnp.linalg.norm(estimate - exact, axis=1) / jnp.linalg.norm(exact, axis=1),
            not_a_number=_any_nan(state) | jnp.any(jnp.isnan(estimate)),
            bytes=jnp.int32(kvjax.cache_bytes(state).device),
        )
        return (state, exact_num, exact_den), seen

    start = (structure.init(rng), jnp.zeros_like(queries), jnp.zeros(queries.shape[0]))
    (state, _, _), seen = jax.lax.scan(step, start, (keys, values))
    return state, seen


def _any_nan(state: Any) -> Array:
    numbers = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.any(jnp.stack([jnp.any(jnp.isnan(leaf)) for leaf in numbers]))


def long_streams(options: Options, tokens: int) -> list[Row]:
    """Error, bytes and soundness of every structure at 2^12, 2^16 and 2^20 tokens; as rows and as a table."""
    drawn = streams.synthetic(options.stream, [options.seed], tokens, options.queries, HEAD_DIM).scaled(options.norm)
    keys, values = (jnp.asarray(part[0].reshape(-1, SCAN_TOKENS, HEAD_DIM)) for part in (drawn.keys, drawn.values))
    queries = jnp.asarray(drawn.queries[0, :, 0])
    checkpoints = [size for size in (2**12, 2**16, 2**20) if size <= tokens]
    rows, lines = [], []
    for name, structure in tqdm(STRUCTURES.items(), desc="long streams", leave=False):
        rng = jax.random.key(options.seed)
        seconds, (state, seen) = speed.timed(follow, name, rng, keys, values, queries)
        kvjax.raise_faults(state)
        nan, held = bool(np.any(seen.not_a_number)), np.unique(seen.bytes).tolist()
        errors = [results.mean_interval(np.asarray(seen.error[size // SCAN_TOKENS - 1])) for size in checkpoints]
        of: dict[str, Any] = {"stream": options.stream, "policy": structure.policy, "variant": name, "n": len(queries)}
        of |= {"seed": options.seed, "bytes_promised": structure.bytes, "not_a_number": nan, "norm": options.norm}
        for size, error in zip(checkpoints, errors, strict=True):
            at: dict[str, Any] = {"context_tokens": size, "device_bytes": int(seen.bytes[size // SCAN_TOKENS - 1])}
            rows.append(results.row(NAME, "synthetic", "relative_error", error, **at, **of))
        promised = "as promised" if held == [structure.bytes] else f"not {structure.bytes}"
        lines.append((name, *map(str, errors), f"{held}: {promised}", "yes" if nan else "no", f"{seconds:.1f}"))
    columns = ("structure", *(f"error at {size}" for size in checkpoints), "bytes", "NaN", "s")
    title = f"One scan over {tokens} tokens, stream {options.stream}, norm {options.norm:g}"
    results.print_table(title, columns, lines)
    return rows


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
