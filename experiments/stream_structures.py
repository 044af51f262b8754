"""The stream structures by themselves: how fast they take in tokens, and a stream of a million tokens through each.

    python -m experiments.stream_structures

Speed is that of a block update of 8,192 tokens of dimension 128, next to what it is held against, timed in the same
run: the reservoir against its token-by-token definition, the cluster table and the tree against the products that they
cannot do without. The long stream goes through each structure in one `lax.scan`, which also sums exact attention for a
fixed set of queries; errors, bytes and soundness are read off on the way.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jaxtyping import Array, Float, Key
from tqdm import tqdm

import kvjax
from experiments.common import results, settings, speed, streams
from kvjax.structures import balance, cluster_table, merge_reduce, reservoir

NAME = "stream_structures"

settings.define_run()
_STREAM = flags.DEFINE_enum("stream", "drift", list(streams.SYNTHETIC), "The stream that goes through the structures.")
_NORM = flags.DEFINE_float("norm", 4, "l2 norm of keys and queries.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 7, "Repetitions; the median is reported, with the extremes.")
_TOKENS = flags.DEFINE_integer("tokens", 2**20, "Tokens of the long stream, a multiple of 4,096.")
_QUERIES = flags.DEFINE_integer("queries", 64, "Queries whose attention is followed along the long stream.")

HEAD_DIM = 128
BLOCK_TOKENS = 8192  # of one update, when speed is measured
SCAN_TOKENS = 4096  # of one update of the long stream
PAIRS = 1024  # s
CLUSTERS, SAMPLES, SUB_BLOCK = 512, 8, 256  # M, t, tokens assigned at a time
BINS, HALVED = 16, 256  # N, entries that one halving takes in
MOST_TOKENS = 2**22  # that the tree's bins can hold

Sums = tuple[Float[Array, "Q D"] | None, Float[Array, "Q"] | None]


class Structure(NamedTuple):
    """A stream structure as this experiment drives it.

    Attributes:
        policy: the policy that it is of.
        init: PRNG key to the empty structure.
        update: (structure, keys [T, D], values [T, D]) to the structure after T more tokens.
        sums: (structure, queries) to its estimates of attention's numerator and denominator; None where it has none.
        bytes: what its docstring promises, for the sizes above.
    """

    policy: str
    init: Callable[[Key[Array, ""]], Any]
    update: Callable[[Any, Float[Array, "T D"], Float[Array, "T D"]], Any]
    sums: Callable[[Any, Float[Array, "Q D"]], Sums]
    bytes: int


def update_reservoir(state: reservoir.WeightedReservoir, keys: Float[Array, "T D"], values: Float[Array, "T D"]):
    return reservoir.extend(state, keys, values, jnp.sum(values**2, axis=1))


def reservoir_sums(state: reservoir.WeightedReservoir, queries: Float[Array, "Q D"]) -> Sums:
    return streams.weighted_terms(queries, state.keys, reservoir.log_weights(state)) @ state.values, None


def update_table(state: cluster_table.ClusterTable, keys: Float[Array, "T D"], values: Float[Array, "T D"]):
    del values
    return cluster_table.extend(state, keys, block=SUB_BLOCK)


def table_sums(state: cluster_table.ClusterTable, queries: Float[Array, "Q D"]) -> Sums:
    assert state.samples is not None
    weights = cluster_table.log_sample_weights(state).reshape(-1)
    return None, jnp.sum(streams.weighted_terms(queries, state.samples.reshape(-1, HEAD_DIM), weights), axis=1)


def update_tree(state: merge_reduce.MergeReduceTree, keys: Float[Array, "T D"], values: Float[Array, "T D"]):
    return merge_reduce.insert(state, keys, values, halve=balance.halve_by_pairs)


def tree_sums(state: merge_reduce.MergeReduceTree, queries: Float[Array, "Q D"]) -> Sums:
    terms = streams.weighted_terms(queries, state.keys, state.log_weight)
    assert state.values is not None
    return terms @ state.values, jnp.sum(terms, axis=1)


STRUCTURES = {
    "reservoir": Structure(
        "subgen",
        lambda rng: reservoir.init_reservoir(PAIRS, HEAD_DIM, HEAD_DIM, jnp.float32, rng),
        update_reservoir,
        reservoir_sums,
        PAIRS * 2 * HEAD_DIM * 4 + 4 * PAIRS + 12 + 8,
    ),
    "table": Structure(
        "subgen",
        lambda rng: cluster_table.init_cluster_table(CLUSTERS, HEAD_DIM, jnp.float32, rng, samples=SAMPLES),
        update_table,
        table_sums,
        CLUSTERS * HEAD_DIM * 4 + CLUSTERS * SAMPLES * HEAD_DIM * 4 + 8 * CLUSTERS + 24,
    ),
    "tree": Structure(
        "balancekv",
        lambda rng: merge_reduce.init_merge_reduce(
            rng, bins=BINS, bin_slots=HALVED // 2, key_dim=HEAD_DIM, value_dim=HEAD_DIM, tokens=MOST_TOKENS
        ),
        update_tree,
        tree_sums,
        BINS * HALVED // 2 * (2 * HEAD_DIM * 4 + 4) + 8 * BINS + 12 + 8,
    ),
}


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    repetitions, tokens = (2, 2**16) if flags.FLAGS.quick else (_REPETITIONS.value, _TOKENS.value)
    rows = speeds(repetitions) + long_streams(tokens // SCAN_TOKENS * SCAN_TOKENS)
    path = pathlib.Path(flags.FLAGS.output_dir) / f"{NAME}.json"
    results.write_rows(path, rows)
    print(f"Rows: {path}")


# --- speed ---

Run = Callable[[Float[Array, "T D"], Float[Array, "T D"]], Any]


class Comparison(NamedTuple):
    """A block update, what it is held against, and the goal for their ratio."""

    structure: str
    update: Run
    against: str
    other: Run
    goal: str
    ratio: Callable[[Any, Any], Any]  # of the seconds of both


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
        return reservoir.scan_steps(state, keys, values, jnp.sum(values**2, axis=1))

    @jax.jit
    def fill(keys, values):
        count = jnp.int32(keys.shape[0])
        return merge_reduce.fill(states["tree"](), keys, values, count, halve=balance.halve_by_pairs)

    leaves = BLOCK_TOKENS // (HALVED // 2)
    gain, cost = (lambda own, other: other / own), (lambda own, other: own / other)
    return [
        Comparison(
            "reservoir",
            Chain(update_reservoir, states["reservoir"]()),
            "token by token",
            Chain(scan_tokens, states["reservoir"]()),
            "50 or more",
            gain,
        ),
        Comparison(
            "table",
            Chain(update_table, states["table"]()),
            "[T, D] x [D, M], [T, D] x [D, new]",
            table_products,
            "2.5 or less",
            cost,
        ),
        Comparison(
            "tree",
            Chain(update_tree, states["tree"]()),
            f"{leaves} x t x t x (D + D_v)",
            # A full tree frees a bin by one halving for each that it opens.
            functools.partial(halving_products, leaves),
            "2.5 or less",
            cost,
        ),
        Comparison(
            "tree, filled at once",
            fill,
            f"{leaves - BINS} x t x t x (D + D_v)",
            functools.partial(halving_products, leaves - BINS),
            "2.5 or less",
            cost,
        ),
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


def speeds(repetitions: int) -> list[results.Row]:
    """Seconds of every update and of what it is held against, alternating; as rows and as a table."""
    drawn = streams.synthetic(_STREAM.value, [flags.FLAGS.seed], (repetitions + 1) * BLOCK_TOKENS, 1, HEAD_DIM)
    drawn = drawn.scaled(_NORM.value)
    blocks = [jnp.asarray(part[0].reshape(-1, BLOCK_TOKENS, HEAD_DIM)) for part in (drawn.keys, drawn.values)]
    rows, lines = [], []
    for one in tqdm(comparisons(jax.random.key(flags.FLAGS.seed)), desc="speed", leave=False):
        times = np.array(
            [[speed.timed(run, *block)[0] for run in (one.update, one.other)] for block in zip(*blocks, strict=True)]
        )
        own, other = times[1:].T  # the first compiles
        ratio = float(one.ratio(np.median(own), np.median(other)))
        ratios = one.ratio(own, other)
        rows.append(
            results.Row(
                experiment=NAME,
                model="synthetic",
                stream=_STREAM.value,
                policy=STRUCTURES[one.structure.partition(",")[0]].policy,
                variant=one.structure,
                metric="update_seconds",
                value=float(np.median(own)),
                context_tokens=BLOCK_TOKENS,
                n=repetitions,
                seed=flags.FLAGS.seed,
                extra={
                    "against": one.against,
                    "against_seconds": float(np.median(other)),
                    "ratio": ratio,
                    "goal": one.goal,
                },
            )
        )
        lines.append(
            (
                one.structure,
                _range(1e3 * own),
                one.against,
                _range(1e3 * other),
                f"{ratio:.3g} [{ratios.min():.3g}, {ratios.max():.3g}]",
                one.goal,
            )
        )
    columns = ("structure", "ms [range]", "against", "ms [range]", "ratio [range]", "goal")
    title = f"Updates of {BLOCK_TOKENS} tokens of dimension {HEAD_DIM}, stream {_STREAM.value}, norm {_NORM.value:g}"
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


def long_streams(tokens: int) -> list[results.Row]:
    """Error, bytes and soundness of every structure at 2^12, 2^16 and 2^20 tokens; as rows and as a table."""
    drawn = streams.synthetic(_STREAM.value, [flags.FLAGS.seed], tokens, _QUERIES.value, HEAD_DIM).scaled(_NORM.value)
    keys, values = (jnp.asarray(part[0].reshape(-1, SCAN_TOKENS, HEAD_DIM)) for part in (drawn.keys, drawn.values))
    queries = jnp.asarray(drawn.queries[0, :, 0])
    checkpoints = [size for size in (2**12, 2**16, 2**20) if size <= tokens]
    rows, lines = [], []
    for name, structure in tqdm(STRUCTURES.items(), desc="long streams", leave=False):
        rng = jax.random.key(flags.FLAGS.seed)
        seconds, (state, seen) = speed.timed(follow, name, rng, keys, values, queries)
        kvjax.check(state)
        nan, held = bool(np.any(seen.not_a_number)), np.unique(seen.bytes).tolist()
        estimates = [results.mean_interval(np.asarray(seen.error[size // SCAN_TOKENS - 1])) for size in checkpoints]
        rows += [
            results.Row(
                experiment=NAME,
                model="synthetic",
                stream=_STREAM.value,
                policy=structure.policy,
                variant=name,
                metric="relative_error",
                value=estimate.value,
                ci95_low=estimate.low,
                ci95_high=estimate.high,
                context_tokens=size,
                n=len(queries),
                seed=flags.FLAGS.seed,
                device_bytes=int(seen.bytes[size // SCAN_TOKENS - 1]),
                extra={"bytes_promised": structure.bytes, "not_a_number": nan, "norm": _NORM.value},
            )
            for size, estimate in zip(checkpoints, estimates, strict=True)
        ]
        promised = "as promised" if held == [structure.bytes] else f"not {structure.bytes}"
        lines.append((name, *map(str, estimates), f"{held}: {promised}", "yes" if nan else "no", f"{seconds:.1f}"))
    columns = ("structure", *(f"error at {size}" for size in checkpoints), "bytes", "NaN", "s")
    results.print_table(f"One scan over {tokens} tokens, stream {_STREAM.value}, norm {_NORM.value:g}", columns, lines)
    return rows


if __name__ == "__main__":
    app.run(main)
