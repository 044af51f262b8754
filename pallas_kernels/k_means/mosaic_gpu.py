"""`k_means` as Pallas kernels for Hopper GPUs (Mosaic GPU); see `pallas_kernels.hopper`.

The sums of hundreds of clusters do not fit on a multiprocessor together with the operands of the inner products. One
kernel assigns points and another one sums them. Points are read twice, which takes little time next to the products.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.batching import run_batched
from pallas_kernels.k_means.oracle import Inputs, LloydStep

TILE = hopper.ROWS  # points, and clusters, that are multiplied at a time
# Points and centroids are sums of three bfloat16 numbers; bfloat16 represents the membership of a point exactly.
PRODUCTS = hopper.Operands.create(jnp.float32, jnp.float32)
SUMS = PRODUCTS._replace(row_parts=1)


def check(inputs: Inputs, *, interpret: Any) -> None:
    """Checks the arguments of `k_means`; raises NotImplementedError if the kernels do not support them.

    Args:
        interpret: Whether the kernels are interpreted, on any device.
    """
    if not interpret:
        hopper.check_device()
    inputs.check_dtypes()
    head_dim = inputs.points.shape[1]
    hopper.check_head_dim(head_dim)
    hopper.choose_stages(functools.partial(_assign_scratch, head_dim), 1)


def k_means(inputs: Inputs, *, interpret: Any) -> LloydStep:
    """`xla.k_means` with float32 precision; inner products are never written to global memory.

    Args:
        interpret: Passed to `plgpu.kernel`.

    Returns:
        Labels, sums per cluster, and the total inner product.
    """
    return run_batched(functools.partial(_k_means, interpret=interpret), inputs)


def _k_means(inputs: Inputs, *, interpret: Any) -> LloydStep:
    points, centroids, is_valid, num_centroids, summands = inputs
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
    """Returns the shared memory of a program that assigns points."""
    operand = functools.partial(hopper.blocked, dtype=PRODUCTS.dtype)
    return {
        "stored": hopper.blocked((TILE, head_dim), jnp.float32),
        "points": operand((PRODUCTS.row_parts, TILE, head_dim)),
        "centroids": operand((stages, PRODUCTS.stored_parts, TILE, head_dim)),
        "point_barrier": plgpu.Barrier(),
        "centroid_barrier": plgpu.Barrier(num_arrivals=PRODUCTS.stored_parts, num_barriers=stages),
        "labels": plgpu.SMEM((TILE,), jnp.int32),
        "products": plgpu.SMEM((TILE,), jnp.float32),
    }


def _assign(
    points: Float[Array, "B N D"], centroids: Float[Array, "B C D"], num_centroids: Int[Array, "B"], interpret: Any
) -> tuple[Int[Array, "B n"], Float[Array, "B n"]]:
    """Returns the centroid of largest inner product of every point, and the product; n is N rounded up to tiles."""
    batch, tokens, head_dim = points.shape
    tiles = pl.cdiv(tokens, TILE)
    centroids = jnp.pad(centroids, ((0, 0), (0, -centroids.shape[1] % TILE), (0, 0)))
    parts = hopper.split_outside_kernels(centroids, PRODUCTS.stored_parts, PRODUCTS.dtype, axis=1)
    scratch_of = functools.partial(_assign_scratch, head_dim)
    stages, _ = hopper.choose_stages(scratch_of)
    labels, products = hopper.launch(
        _assign_kernel, (num_centroids, points, parts),
        [jax.ShapeDtypeStruct((batch, tiles * TILE), dtype) for dtype in (jnp.int32, jnp.float32)], scratch_of(stages),
        grid={"tiles": tiles, "batch": batch}, interpret=interpret, flops=2 * centroids.size * tokens,
    )  # fmt: skip
    return labels, products


def _assign_kernel(num_centroids_ref, points_ref, centroids_ref, labels_ref, products_ref, **scratch):
    """Assigns a tile of points to the centroids, of which it reads one tile at a time."""
    batch, tile = lax.axis_index("batch"), lax.axis_index("tiles")
    count, centroids, barrier = num_centroids_ref[batch], scratch["centroids"], scratch["centroid_barrier"]
    stages = centroids.shape[0]
    block_shape = (TILE, TILE)
    steps = lax.div(count + (TILE - 1), TILE)

    def fetch(step):
        @pl.when(step < steps)
        def _():
            stage = lax.rem(step, stages)
            for part in range(PRODUCTS.stored_parts):
                source = centroids_ref.at[batch, part, pl.ds(step * TILE, TILE)]
                plgpu.copy_gmem_to_smem(source, centroids.at[stage, part], barrier.at[stage])

    point_tile = pl.ds(tile * TILE, TILE)
    plgpu.copy_gmem_to_smem(points_ref.at[batch, point_tile], scratch["stored"], scratch["point_barrier"])
    for early in range(stages):
        fetch(jnp.int32(early))
    plgpu.barrier_wait(scratch["point_barrier"])
    hopper.as_operands(scratch["stored"], scratch["points"], PRODUCTS)
    plgpu.commit_smem()

    def process_step(step, carry):
        """Returns the best product and its centroid, `carry`, updated by the tile of centroids of `step`."""
        best, nearest = carry
        stage = lax.rem(step, stages)
        plgpu.barrier_wait(barrier.at[stage])
        operands = [centroids.at[stage, part] for part in range(PRODUCTS.stored_parts)]
        products = hopper.query_key_products(scratch["points"], operands, PRODUCTS)
        fetch(step + stages)
        index = step * TILE + plgpu.broadcasted_iota(jnp.int32, block_shape, 1, layout=hopper.LAYOUT)
        products = jnp.where(index < count, products, -jnp.inf)
        highest, first = hopper.max_and_argmax(products, index)
        return jnp.maximum(best, highest), jnp.where(highest > best, first, nearest)

    start = hopper.full_rows(-jnp.inf), hopper.full_rows(0.0)
    best, nearest = lax.fori_loop(0, steps, process_step, start)
    scratch["labels"][...] = nearest.astype(jnp.int32)
    scratch["products"][...] = best
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch["labels"], labels_ref.at[batch, point_tile])
    plgpu.copy_smem_to_gmem(scratch["products"], products_ref.at[batch, point_tile])
    plgpu.wait_smem_to_gmem(0)


def _sum_scratch(head_dim: int, stages: int) -> dict[str, Any]:
    """Returns the shared memory of a program that sums points."""
    ring = hopper.blocked((stages, TILE, head_dim), jnp.float32)
    return {
        # The sums are written through the memory of the points, whose reads are complete by then.
        "stored": plgpu.RefUnion(ring, hopper.blocked((TILE, head_dim), jnp.float32)),
        "points": hopper.blocked((SUMS.stored_parts, TILE, head_dim), SUMS.dtype),
        "members": hopper.blocked((1, TILE, TILE), SUMS.dtype, swizzled_as=head_dim),
        "labels": plgpu.SMEM((stages, TILE), jnp.int32),
        "barrier": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }


def _sum(labels: Int[Array, "B N"], x: Float[Array, "B N D"], clusters: int, interpret: Any) -> Float[Array, "B C D"]:
    """Returns the sum of every cluster's points: the product of membership, ones and zeros, and points."""
    batch, tokens, head_dim = x.shape
    tiles, blocks = pl.cdiv(clusters, TILE), pl.cdiv(tokens, TILE)
    scratch_of = functools.partial(_sum_scratch, head_dim)
    stages, programs = hopper.choose_stages(scratch_of)
    splits = hopper.balance_splits([batch * tiles], [blocks], programs)[0]
    # Points after the last one are zeros, so that their label is irrelevant.
    labels = jnp.pad(labels, ((0, 0), (0, blocks * TILE - labels.shape[1])), constant_values=-1)

    def cluster_sums(*refs, **scratch):
        _sum_kernel(*refs, **scratch, blocks=blocks)

    output = jax.ShapeDtypeStruct((batch, splits, tiles * TILE, head_dim), jnp.float32)
    (sums,) = hopper.launch(
        cluster_sums, (labels, x), [output], scratch_of(stages),
        grid={"tiles": tiles, "splits": splits, "batch": batch}, interpret=interpret, flops=2 * clusters * x.size,
    )  # fmt: skip
    return jnp.sum(sums, axis=1)[:, :clusters]


def _sum_kernel(labels_ref, x_ref, sums_ref, *, stored, points, members, labels, barrier, blocks):
    """Sums the points of one split for a tile of clusters."""
    batch, split, tile = (lax.axis_index(name) for name in ("batch", "splits", "tiles"))
    ring, sums_out = stored
    stages, _, head_dim = ring.shape
    per_split = pl.cdiv(blocks, lax.axis_size("splits"))
    begin = split * per_split
    steps = jnp.clip(blocks - begin, 0, per_split)
    block_shape = (TILE, TILE)
    cluster = tile * TILE + plgpu.broadcasted_iota(jnp.int32, block_shape, 0, layout=hopper.LAYOUT)
    ones = hopper.full_rows(1.0)

    def fetch(step):
        @pl.when(step < steps)
        def _():
            stage, block = lax.rem(step, stages), pl.ds((begin + step) * TILE, TILE)
            plgpu.copy_gmem_to_smem(x_ref.at[batch, block], ring.at[stage], barrier.at[stage])
            plgpu.copy_gmem_to_smem(labels_ref.at[batch, block], labels.at[stage], barrier.at[stage])

    for early in range(stages):
        fetch(jnp.int32(early))

    def process_step(step, sums):
        """Returns `sums` with the block of points of `step` added."""
        stage = lax.rem(step, stages)
        plgpu.barrier_wait(barrier.at[stage])
        label = hopper.broadcast_slots(hopper.load(labels.at[stage], hopper.SLOT_LAYOUT), block_shape)
        members[0] = jnp.where(cluster == label, 1.0, 0.0).astype(SUMS.dtype)
        values = hopper.as_operands(ring.at[stage], points, SUMS)
        plgpu.commit_smem()
        fetch(step + stages)
        return hopper.add_values(sums, ones, members, values, SUMS)

    sums = lax.fori_loop(0, steps, process_step, hopper.RunningPartials.create(head_dim).numerator)
    hopper.store_columns(sums_out, sums)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(sums_out, sums_ref.at[batch, split, pl.ds(tile * TILE, TILE)])
    plgpu.wait_smem_to_gmem(0)
