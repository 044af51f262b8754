"""A pass of Lloyd's algorithm as Pallas kernels for Hopper GPUs (Mosaic GPU), in the way of `pallas_kernels.hopper`.

Sums of hundreds of clusters do not fit on a multiprocessor beside what assigns points to them. So one kernel assigns
and another sums: points are read twice, which is a small part of the time that the products take.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import hopper
from pallas_kernels.batching import fold_mapped_axes
from pallas_kernels.k_means.reference import LloydStep

TILE = hopper.ROWS  # points, and clusters, that are multiplied at a time
# Points and directions are sums of three bfloat16 numbers; membership is a bfloat16 number, exactly.
PRODUCTS = hopper.Operands.of(jnp.float32, jnp.float32)
SUMS = PRODUCTS._replace(row_parts=1)


def check(
    points: Float[Array, "N D"],
    centroids: Float[Array, "C D"],
    _is_valid: Bool[Array, "N"],
    _num_centroids: Int[Array, ""],
    summands: Float[Array, "N D"] | None = None,
    *,
    interpret: Any,
) -> None:
    """Checks that the kernels support the arguments of `k_means`.

    Args:
        points: The points of one head.
        centroids: The centroids.
        summands: The vectors that are summed per cluster.
        interpret: Whether the kernels are interpreted, on any device.

    Raises:
        NotImplementedError: If the kernels do not support them.
    """
    if not interpret:
        hopper.check_device()
    for name, array in {"points": points, "centroids": centroids, "summands": summands}.items():
        if array is not None and array.dtype != jnp.float32:
            raise NotImplementedError(f"{name} are {array.dtype.name}; the Hopper kernels support float32")
    head_dim = points.shape[1]
    hopper.check_head_dim(head_dim)
    hopper.roomiest(functools.partial(_assign_scratch, head_dim), 1)


def k_means(
    points: Float[Array, "N D"],
    centroids: Float[Array, "C D"],
    is_valid: Bool[Array, "N"],
    num_centroids: Int[Array, ""],
    summands: Float[Array, "N D"] | None = None,
    *,
    interpret: Any,
) -> LloydStep:
    """`reference.k_means` with float32 precision; inner products are never written to global memory.

    Args:
        points: The points of one head, float32.
        centroids: float32.
        is_valid: Which points are assigned.
        num_centroids: The number of centroids that points are assigned to, int32.
        summands: The vectors that are summed per cluster; None means the points.
        interpret: Passed to `plgpu.kernel`.

    Returns:
        Labels, sums per cluster, and the total inner product.
    """
    run = fold_mapped_axes(functools.partial(_k_means, interpret=interpret))
    results = run(*jax.tree.map(lambda x: x[None], (points, centroids, is_valid, num_centroids, summands)))
    return jax.tree.map(lambda x: x[0], results)


def _k_means(points, centroids, is_valid, num_centroids, summands, *, interpret: Any) -> LloydStep:
    clusters, tokens = centroids.shape[1], points.shape[1]
    # The copy engine needs multiples of eight rows.
    padding = ((0, 0), (0, -tokens % 8), (0, 0))
    points = jnp.pad(points, padding)
    nearest, product = _assign(points, centroids, num_centroids.astype(jnp.int32), interpret)
    labels = jnp.where(is_valid, nearest[:, :tokens], clusters)
    total_product = jnp.sum(jnp.where(is_valid, product[:, :tokens], 0.0), axis=1)
    sums = _sum(labels, points if summands is None else jnp.pad(summands, padding), clusters, interpret)
    return LloydStep(labels, sums, total_product)


def _assign_scratch(head_dim: int, stages: int) -> dict[str, Any]:
    """What a program that assigns keeps in shared memory."""
    operand = functools.partial(hopper.blocked, dtype=PRODUCTS.dtype)
    return {
        "stored": hopper.blocked((TILE, head_dim), jnp.float32),
        "points": operand((PRODUCTS.row_parts, TILE, head_dim)),
        "directions": operand((stages, PRODUCTS.stored_parts, TILE, head_dim)),
        "points_came": plgpu.Barrier(),
        "directions_came": plgpu.Barrier(num_arrivals=PRODUCTS.stored_parts, num_barriers=stages),
        "label": plgpu.SMEM((TILE,), jnp.int32),
        "product": plgpu.SMEM((TILE,), jnp.float32),
    }


def _assign(
    points: Float[Array, "B N D"], directions: Float[Array, "B C D"], used: Int[Array, "B"], interpret: Any
) -> tuple[Int[Array, "B n"], Float[Array, "B n"]]:
    """The direction with which every point's product is largest, and that product; n is N in whole tiles."""
    batch, tokens, head_dim = points.shape
    tiles = pl.cdiv(tokens, TILE)
    directions = jnp.pad(directions, ((0, 0), (0, -directions.shape[1] % TILE), (0, 0)))
    parts = jnp.stack(list(hopper.parts(directions, PRODUCTS.stored_parts, PRODUCTS.dtype)), axis=1)
    scratch_of = functools.partial(_assign_scratch, head_dim)
    stages, _ = hopper.roomiest(scratch_of)
    found = jax.ShapeDtypeStruct((batch, tiles * TILE), jnp.float32)

    return plgpu.kernel(
        _assign_kernel,
        out_type=[jax.ShapeDtypeStruct(found.shape, jnp.int32), found],
        scratch_types=scratch_of(stages),
        grid=(tiles, batch),
        grid_names=("tiles", "batch"),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        **hopper.cost(
            flops=2 * directions.size * tokens,
            bytes_accessed=4 * (points.size + directions.size + 2 * batch * tokens),
            transcendentals=0,
        ),
    )(used, points, parts)


def _assign_kernel(
    used_ref,
    points_ref,
    directions_ref,
    label_ref,
    product_ref,
    *,
    stored,
    points,
    directions,
    points_came,
    directions_came,
    label,
    product,
):
    """A tile of points against all directions, a tile of those at a time."""
    batch, tile = lax.axis_index("batch"), lax.axis_index("tiles")
    used = used_ref[batch]
    stages = directions.shape[0]
    in_two = (TILE, TILE)
    steps = lax.div(used + (TILE - 1), TILE)

    def fetch(step):
        @pl.when(step < steps)
        def _():
            stage = lax.rem(step, stages)
            for part in range(PRODUCTS.stored_parts):
                plgpu.copy_gmem_to_smem(
                    directions_ref.at[batch, part, pl.ds(step * TILE, TILE)],
                    directions.at[stage, part],
                    directions_came.at[stage],
                )

    plgpu.copy_gmem_to_smem(points_ref.at[batch, pl.ds(tile * TILE, TILE)], stored, points_came)
    for early in range(stages):
        fetch(jnp.int32(early))
    plgpu.barrier_wait(points_came)
    hopper.as_operands(stored, points, PRODUCTS)
    plgpu.commit_smem()

    def step(step, carry):
        best, nearest = carry
        stage = lax.rem(step, stages)
        plgpu.barrier_wait(directions_came.at[stage])
        products = hopper.logits(
            points, [directions.at[stage, part] for part in range(PRODUCTS.stored_parts)], PRODUCTS
        )
        fetch(step + stages)
        number = step * TILE + plgpu.broadcasted_iota(jnp.int32, in_two, 1, layout=hopper.LAYOUT)
        products = jnp.where(number < used, products, -jnp.inf)
        highest, first = hopper.first_highest(products, number)
        return jnp.maximum(best, highest), jnp.where(highest > best, first, nearest)

    start = hopper.full_rows(-jnp.inf), hopper.full_rows(0.0)
    best, nearest = lax.fori_loop(0, steps, step, start)
    label[...] = nearest.astype(jnp.int32)
    product[...] = best
    plgpu.commit_smem()
    here = pl.ds(tile * TILE, TILE)
    plgpu.copy_smem_to_gmem(label, label_ref.at[batch, here])
    plgpu.copy_smem_to_gmem(product, product_ref.at[batch, here])
    plgpu.wait_smem_to_gmem(0)


def _sum_scratch(head_dim: int, stages: int) -> dict[str, Any]:
    """What a program that sums keeps in shared memory."""
    wide = hopper.blocked((stages, TILE, head_dim), jnp.float32)
    return {
        # The sums leave through the memory of the rows, of which none is read any more then.
        "stored": plgpu.RefUnion(wide, hopper.blocked((TILE, head_dim), jnp.float32)),
        "rows": hopper.blocked((SUMS.stored_parts, TILE, head_dim), SUMS.dtype),
        "members": hopper.blocked((1, TILE, TILE), SUMS.dtype, swizzled_as=head_dim),
        "labels": plgpu.SMEM((stages, TILE), jnp.int32),
        "came": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }


def _sum(label: Int[Array, "B N"], x: Float[Array, "B N D"], clusters: int, interpret: Any) -> Float[Array, "B C D"]:
    """The sum of every cluster's rows: membership, ones and zeros, times rows."""
    batch, tokens, head_dim = x.shape
    tiles, blocks = pl.cdiv(clusters, TILE), pl.cdiv(tokens, TILE)
    scratch_of = functools.partial(_sum_scratch, head_dim)
    stages, places = hopper.roomiest(scratch_of)
    splits = hopper.even_splits(batch * tiles, [blocks], places)[0]
    # Rows past the last are zeros, whatever their label.
    label = jnp.pad(label, ((0, 0), (0, blocks * TILE - label.shape[1])), constant_values=-1)

    def cluster_sums(*refs, **scratch):
        _sum_kernel(*refs, **scratch, blocks=blocks)

    sums = plgpu.kernel(
        cluster_sums,
        out_type=jax.ShapeDtypeStruct((batch, splits, tiles * TILE, head_dim), jnp.float32),
        scratch_types=scratch_of(stages),
        grid=(tiles, splits, batch),
        grid_names=("tiles", "splits", "batch"),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        **hopper.cost(
            flops=2 * clusters * x.size,
            bytes_accessed=4 * (x.size + label.size + batch * splits * tiles * TILE * head_dim),
            transcendentals=0,
        ),
    )(label, x)
    return jnp.sum(sums, axis=1)[:, :clusters]


def _sum_kernel(label_ref, x_ref, sums_ref, *, stored, rows, members, labels, came, blocks):
    """A tile of clusters over the rows of one split."""
    batch, split, tile = (lax.axis_index(name) for name in ("batch", "splits", "tiles"))
    stored, sums_out = stored
    stages, _, head_dim = stored.shape
    per_split = pl.cdiv(blocks, lax.axis_size("splits"))
    begin = split * per_split
    steps = jnp.clip(blocks - begin, 0, per_split)
    in_two = (TILE, TILE)
    cluster = tile * TILE + plgpu.broadcasted_iota(jnp.int32, in_two, 0, layout=hopper.LAYOUT)
    ones = hopper.full_rows(1.0)

    def fetch(step):
        @pl.when(step < steps)
        def _():
            stage, here = lax.rem(step, stages), pl.ds((begin + step) * TILE, TILE)
            plgpu.copy_gmem_to_smem(x_ref.at[batch, here], stored.at[stage], came.at[stage])
            plgpu.copy_gmem_to_smem(label_ref.at[batch, here], labels.at[stage], came.at[stage])

    for early in range(stages):
        fetch(jnp.int32(early))

    def step(step, sums):
        stage = lax.rem(step, stages)
        plgpu.barrier_wait(came.at[stage])
        label = hopper.of_slots(hopper.load(labels.at[stage], hopper.OF_SLOTS), in_two)
        members[0] = jnp.where(cluster == label, 1.0, 0.0).astype(SUMS.dtype)
        values = hopper.as_operands(stored.at[stage], rows, SUMS)
        plgpu.commit_smem()
        fetch(step + stages)
        return hopper.add_values(sums, ones, members, values, SUMS)

    sums = lax.fori_loop(0, steps, step, hopper.RunningPartials.create(head_dim).numerator)
    hopper.store_columns(sums_out, sums)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(sums_out, sums_ref.at[batch, split, pl.ds(tile * TILE, TILE)])
    plgpu.wait_smem_to_gmem(0)
