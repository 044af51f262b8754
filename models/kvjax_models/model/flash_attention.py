"""Causal attention of entire prompts by kernels that come with JAX: splash attention on TPUs, cuDNN on NVIDIA GPUs.

`unsupported_reason` explains why a platform's kernel does not support a layer. In that case, prompts are processed
chunk by chunk (`exact_attention`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Float, Int

from kvjax_models.model.llama import DecoderLayer

# Splash attention's block of queries and of keys (its default of 128 is far too small), and its smallest block.
BLOCK, LANES = 1024, 128
_MAX_STEPS = 2**18  # size of splash attention's table of steps, which must fit a TPU's scalar memory


class AttentionSpec(NamedTuple):
    """The attention that a layer computes over its prompts."""

    dtype: np.dtype
    tokens: int  # padded length of the prompts
    head_dim: int
    window: int | None  # maximum number of visible tokens including the token itself
    logit_cap: float | None
    sinks: bool  # whether there are attention sink logits
    chunks: int = 1  # number of equal chunks of the prompt
    runs: int = 1  # number of equal runs per chunk; the queries belong to one run of each chunk (`run_index`)

    @classmethod
    def for_layer(
        cls, layer: DecoderLayer, dtype: np.dtype, tokens: int, chunks: int = 1, runs: int = 1
    ) -> "AttentionSpec":
        """Returns the spec of a layer.

        Args:
            dtype: dtype of queries, keys and values.
            tokens: padded length of the prompts.
            runs: number of runs per chunk.
        """
        sinks = layer.sink_logits is not None
        head_dim = layer.attention.head_dim
        return cls(dtype, tokens, head_dim, layer.window, layer.attention_logit_cap, sinks, chunks, runs)

    def positions(self, run: Int[Array, ""] | int = 0) -> Int[Array, "n"] | Int[np.ndarray, "n"]:
        """Returns the positions of the queries, given the run of the first chunk."""
        length = self.tokens // (self.chunks * self.runs)
        index = np.arange(self.chunks * length)
        chunk = index // length
        return (chunk * self.runs + run_index(chunk, self.runs, run)) * length + index % length


def run_index(chunk: Any, runs: int, run: Any) -> Any:
    """Returns the run of a chunk in zigzag order, which balances the work of causal attention between devices.

    Args:
        runs: number of runs per chunk.
        run: the run of the first chunk; odd chunks reverse the order.
    """
    return run + chunk % 2 * (runs - 1 - 2 * run)


# Takes queries, keys, values, attention sink logits, and the run of the first chunk that the queries belong to.
Attend = Callable[
    [
        Float[Array, "B n H_q D"],
        Float[Array, "B H_kv N D"],
        Float[Array, "B H_kv N D"],
        Float[Array, "H_q"] | None,
        Int[Array, ""] | int,
    ],
    Float[Array, "B n H_q D"],
]


def unsupported_reason(platform: str, spec: AttentionSpec) -> str | None:
    """Explains why programs for a platform process prompts chunk by chunk instead of with a kernel.

    Args:
        platform: "tpu", "cuda" or "cpu".
        spec: attention to compute.

    Returns:
        The reason; None if the platform's kernel supports the attention.
    """
    if platform not in _KERNELS:
        return f"{platform!r} has no attention kernel"
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{spec.dtype} numbers: the kernel would round them to 16 bits"
    return _KERNELS[platform].unsupported_reason(spec)


def available_kernels(spec: AttentionSpec) -> dict[str, Attend]:
    """Returns the attention functions of all platforms whose kernel supports the attention.

    Args:
        spec: the attention of a layer.

    Returns:
        Functions by platform ("tpu", "cuda").
    """
    platforms = (platform for platform in _KERNELS if unsupported_reason(platform, spec) is None)
    return {platform: functools.partial(_KERNELS[platform].attend, spec) for platform in platforms}


# --- TPU ---


def _splash_unsupported(spec: AttentionSpec) -> str | None:
    """Returns why splash attention does not support the attention."""
    if spec.dtype != jnp.bfloat16:
        return f"{spec.dtype} numbers: TPUs multiply bfloat16"
    if spec.head_dim % 64:
        return f"a head dimension of {spec.head_dim}; splash attention requires a multiple of 64"
    if -(-spec.tokens // (spec.runs * _block_size(spec))) * _max_kv_blocks(spec) > _MAX_STEPS:
        return f"{spec.tokens} tokens have more blocks than fit in a TPU's scalar memory"
    return None


def _splash_attention(spec: AttentionSpec, query, keys, values, sink_logits, run=0, *, interpret: bool = False):
    """Returns the output of splash attention; see `Attend`."""
    block, (_, num_queries, heads, head_dim) = _block_size(spec), query.shape

    def pad(x: Array) -> Array:
        # Padding comes last, so causal attention never reads it.
        return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block), (0, 0)))

    queries = pad((query.astype(jnp.float32) / math.sqrt(head_dim)).astype(query.dtype).swapaxes(1, 2))
    padding = (0, queries.shape[2] - num_queries)
    positions: Any = jnp.pad(spec.positions(run), padding, mode="edge").astype(jnp.int32)
    kv_blocks, visibility = _kv_blocks(spec, positions)
    lookback = None if spec.window is None else spec.window - 1
    mask = masks.LocalMask((queries.shape[2], queries.shape[2]), (lookback, 0), 0)
    mask_info = MaskInfo(
        data_next=kv_blocks[None],
        mask_next=None,
        block_mask=visibility[None],
        partial_mask_blocks=None,
        q_sequence=positions,
    )
    block_sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=math.gcd(block, 512 if block <= BLOCK else 256)
    )
    kernel = splash.SplashAttentionKernel(
        mask_info,
        None,
        None,
        block_sizes=block_sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=spec.logit_cap,
        residual_checkpoint_name=None,
        mask_function=mask.mask_function,
        interpret=interpret,
    )
    sinks = None if sink_logits is None else jnp.broadcast_to(sink_logits.astype(jnp.float32), (heads,))

    def attend(queries: Array, keys: Array, values: Array) -> Any:
        return kernel(queries, keys, values, None, sinks)

    attended: Array = jax.vmap(attend)(queries, pad(keys), pad(values))
    return attended[:, :, :num_queries].swapaxes(1, 2).astype(query.dtype)


def _block_size(spec: AttentionSpec) -> int:
    """Returns the number of queries, and of keys, per block."""
    block = BLOCK if spec.tokens <= 512 * BLOCK else 2 * BLOCK
    return min(block, -(-spec.tokens // LANES) * LANES)


def _kv_blocks(
    spec: AttentionSpec, positions: Int[Array, "n"]
) -> tuple[Int[Array, "n_blocks steps"], Int[Array, "n_blocks steps"]]:
    """Returns which KV blocks each block of queries reads and how much of each is visible.

    Visibility is 0 for none (the block is prefetched for the next queries), 1 for a part and 2 for all. JAX derives the
    same by evaluating the mask token by token, which takes a minute for 128k tokens.
    """
    block = _block_size(spec)
    earliest, latest = positions[::block, None], positions[block - 1 :: block, None]
    first, last = _kv_block_range(spec, earliest, latest)
    index = first + np.arange(_max_kv_blocks(spec))
    is_visible = index <= last
    is_complete = ((index + 1) * block <= earliest) & (latest - index * block < (spec.window or spec.tokens))
    prefetched = jnp.append(first[1:], jnp.zeros((1, 1), first.dtype), axis=0)
    visibility = is_visible.astype(np.int8) + (is_visible & is_complete)
    return jnp.where(is_visible, index, prefetched).astype(np.int16), visibility


def _kv_block_range(spec: AttentionSpec, earliest: Any, latest: Any) -> tuple[Any, Any]:
    """Returns the first and the last KV block that queries between two positions read."""
    block = _block_size(spec)
    return (earliest - (spec.window or spec.tokens) + 1).clip(0) // block, latest // block


@functools.lru_cache(maxsize=64)
def _max_kv_blocks(spec: AttentionSpec) -> int:
    """Returns the maximum number of KV blocks that a block of queries reads."""
    block, maximum = _block_size(spec), 0
    for run in range(spec.runs):
        positions = np.asarray(spec.positions(run))
        positions = np.pad(positions, (0, -len(positions) % block), mode="edge")
        first, last = _kv_block_range(spec, positions[::block], positions[block - 1 :: block])
        maximum = max(maximum, int(np.max(last - first)) + 1)
    return maximum


# --- GPU ---


def _cudnn_unsupported(spec: AttentionSpec) -> str | None:
    """Returns why cuDNN does not support the attention."""
    if spec.logit_cap is not None:
        return "logits have a cap, which cuDNN does not support"
    if spec.sinks:
        return "attention sinks, which cuDNN does not support"
    if spec.runs > 1:
        return "devices share the queries of a prompt; cuDNN does not support their offsets"
    if spec.head_dim % 8 or spec.head_dim > 128:
        return f"a head dimension of {spec.head_dim}; cuDNN requires a multiple of 8 up to 128 on every GPU"
    return _gpu_unsupported()


def _gpu_unsupported() -> str | None:
    """Returns why this process's GPU does not support cuDNN's attention."""
    if jax.default_backend() != "gpu":
        return "this process has no GPU whose cuDNN could be queried"
    device = jax.local_devices()[0]
    if not hasattr(device, "compute_capability") or float(device.compute_capability) < 8:
        return f"cuDNN requires an NVIDIA GPU of compute capability 8.0 or later, not {device.device_kind}"
    return None


def _cudnn_attention(spec: AttentionSpec, query, keys, values, sink_logits, run=0):
    """Returns the output of cuDNN's attention; see `Attend`."""
    assert sink_logits is None and run == 0
    window = None if spec.window is None else (spec.window - 1, 0)
    return jax.nn.dot_product_attention(
        query,
        keys.swapaxes(1, 2),
        values.swapaxes(1, 2),
        is_causal=True,
        local_window_size=window,
        implementation="cudnn",
    )


class _Kernel(NamedTuple):
    unsupported_reason: Callable[[AttentionSpec], str | None]
    attend: Callable[..., Array]


_KERNELS = {
    "tpu": _Kernel(_splash_unsupported, _splash_attention),
    "cuda": _Kernel(_cudnn_unsupported, _cudnn_attention),
}
