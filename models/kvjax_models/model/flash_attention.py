"""Causal attention of whole prompts by kernels that come with JAX: splash attention on TPUs, cuDNN's on NVIDIA GPUs.

Which of them a program takes, and why not, `unsupported_reason` says. Where neither is taken, prompts are read chunk by chunk
(`exact_attention`).
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

# Queries, and keys, of a step of splash attention, whose own default of 128 is far too small; the fewest it takes.
BLOCK, LANES = 1024, 128
# Numbers of a table of steps, which lies in a TPU's memory for scalars.
_MOST_STEPS = 2**18


class AttentionSpec(NamedTuple):
    """What a layer asks of attention over its prompts."""

    dtype: np.dtype
    tokens: int  # prompts are padded to so many
    head_dim: int
    window: int | None  # tokens that a token sees, itself included
    logit_cap: float | None
    sinks: bool  # whether there are logits of sinks
    pieces: int = 1  # equal ones, which the prompt consists of
    runs: int = 1  # equal ones, which each piece consists of: the queries are those of one run of each (`run_of`)

    @classmethod
    def of(cls, layer: DecoderLayer, dtype: np.dtype, tokens: int, pieces: int = 1, runs: int = 1) -> "AttentionSpec":
        """What a layer asks whose numbers have that dtype."""
        sinks = layer.sink_logits is not None
        return cls(
            dtype, tokens, layer.attention.head_dim, layer.window, layer.attention_logit_cap, sinks, pieces, runs
        )

    def positions(self, run: Int[Array, ""] | int = 0) -> Int[Array, "n"] | Int[np.ndarray, "n"]:
        """The tokens whose queries are asked: those of that run of the first piece."""
        length = self.tokens // (self.pieces * self.runs)
        number = np.arange(self.pieces * length)
        piece = number // length
        return (piece * self.runs + run_index(piece, self.runs, run)) * length + number % length


def run_index(piece: Any, runs: int, run: Any) -> Any:
    """Which run of a piece is that of number `run` in the first: the order turns from piece to piece, so that who has
    an early run of one has a late run of the next."""
    return run + piece % 2 * (runs - 1 - 2 * run)


# Queries, keys, values, sinks, and the number of the run that the queries are of.
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


def unsupported_reason(platform: str, asked: AttentionSpec) -> str | None:
    """Why programs for a platform ("tpu", "cuda", "cpu") read such prompts chunk by chunk, in XLA's products; None
    where they take the platform's kernel."""
    if platform not in _KERNELS:
        return f"there is no kernel for {platform!r}"
    if asked.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{asked.dtype} numbers: the kernel would round them to 16 bits"
    return _KERNELS[platform].unsupported_reason(asked)


def available_kernels(asked: AttentionSpec) -> dict[str, Attend]:
    """What attends to prompts as asked, for every platform whose kernel does."""
    able = (platform for platform in _KERNELS if unsupported_reason(platform, asked) is None)
    return {platform: functools.partial(_KERNELS[platform].attend, asked) for platform in able}


# --- TPU ---


def _why_not_splash(asked: AttentionSpec) -> str | None:
    if asked.dtype != jnp.bfloat16:
        return f"{asked.dtype} numbers: TPUs multiply bfloat16 ones"
    if asked.head_dim % 64:
        return f"a head dimension of {asked.head_dim}; splash attention takes multiples of 64"
    if -(-asked.tokens // (asked.runs * _block(asked))) * _width(asked) > _MOST_STEPS:
        return f"{asked.tokens} tokens have more blocks than a table for scalars has places"
    return None


def _splash(asked: AttentionSpec, query, keys, values, sink_logits, run=0, *, interpret: bool = False):
    block, (_, queries, heads, head_dim) = _block(asked), query.shape
    # What is padded comes last, and no token sees it.
    wide = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block), (0, 0)))  # noqa: E731
    rows = wide((query.astype(jnp.float32) / math.sqrt(head_dim)).astype(query.dtype).swapaxes(1, 2))
    positions: Any = jnp.pad(asked.positions(run), (0, rows.shape[2] - queries), mode="edge").astype(jnp.int32)
    of, kinds = _steps(asked, positions)
    behind = None if asked.window is None else asked.window - 1
    mask = masks.LocalMask((rows.shape[2], rows.shape[2]), (behind, 0), 0)
    kernel = splash.SplashAttentionKernel(
        MaskInfo(
            data_next=of[None],
            mask_next=None,
            block_mask=kinds[None],
            partial_mask_blocks=None,
            q_sequence=positions,
        ),
        None,
        None,
        block_sizes=splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=math.gcd(block, 512 if block <= BLOCK else 256)
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=asked.logit_cap,
        residual_checkpoint_name=None,
        mask_function=mask.mask_function,
        interpret=interpret,
    )
    sinks = None if sink_logits is None else jnp.broadcast_to(sink_logits.astype(jnp.float32), (heads,))
    of_row: Callable[..., Any] = lambda *given: kernel(*given, None, sinks)  # noqa: E731
    attended: Array = jax.vmap(of_row)(rows, wide(keys), wide(values))
    return attended[:, :, :queries].swapaxes(1, 2).astype(query.dtype)


def _block(asked: AttentionSpec) -> int:
    wide = BLOCK if asked.tokens <= 512 * BLOCK else 2 * BLOCK
    return min(wide, -(-asked.tokens // LANES) * LANES)


def _steps(
    asked: AttentionSpec, positions: Int[Array, "n"]
) -> tuple[Int[Array, "n_blocks steps"], Int[Array, "n_blocks steps"]]:
    """Which blocks of keys a block of queries at these rising positions reads, one behind the other, and what of each
    it sees: 0 nothing (the block is there to be fetched ahead), 1 a part, 2 all.

    JAX finds the same by evaluating the mask token by token, which takes a minute for 128k tokens.
    """
    block = _block(asked)
    earliest, latest = positions[::block, None], positions[block - 1 :: block, None]
    first, last = _seen(asked, earliest, latest)
    own = first + np.arange(_width(asked))
    seen = own <= last
    sees_all = ((own + 1) * block <= earliest) & (latest - own * block < (asked.window or asked.tokens))
    following = jnp.append(first[1:], jnp.zeros((1, 1), first.dtype), axis=0)
    return jnp.where(seen, own, following).astype(np.int16), seen.astype(np.int8) + (seen & sees_all)


def _seen(asked: AttentionSpec, earliest: Any, latest: Any) -> tuple[Any, Any]:
    """The first and the last block of keys that queries see between two positions."""
    block = _block(asked)
    return (earliest - (asked.window or asked.tokens) + 1).clip(0) // block, latest // block


@functools.lru_cache(maxsize=64)
def _width(asked: AttentionSpec) -> int:
    """The most blocks of keys that a block of queries sees."""
    block, width = _block(asked), 0
    for run in range(asked.runs):
        positions = np.asarray(asked.positions(run))
        positions = np.pad(positions, (0, -len(positions) % block), mode="edge")
        first, last = _seen(asked, positions[::block], positions[block - 1 :: block])
        width = max(width, int(np.max(last - first)) + 1)
    return width


# --- GPU ---


def _why_not_cudnn(asked: AttentionSpec) -> str | None:
    if asked.logit_cap is not None:
        return "logits have a cap, which cuDNN does not know"
    if asked.sinks:
        return "attention has sinks, which cuDNN does not know"
    if asked.runs > 1:
        return "devices share a prompt's queries, whose offsets cuDNN does not know"
    if asked.head_dim % 8 or asked.head_dim > 128:
        return f"a head dimension of {asked.head_dim}; cuDNN takes multiples of 8 up to 128 on every GPU"
    return _why_not_device()


def _why_not_device() -> str | None:
    if jax.default_backend() != "gpu":
        return "this process has no GPU to ask for its cuDNN"
    device = jax.local_devices()[0]
    if not hasattr(device, "compute_capability") or float(device.compute_capability) < 8:
        return f"cuDNN's attention needs an NVIDIA GPU of compute capability 8.0 or later; this is {device.device_kind}"
    return None


def _cudnn(asked: AttentionSpec, query, keys, values, sink_logits, run=0):
    assert sink_logits is None and run == 0
    window = None if asked.window is None else (asked.window - 1, 0)
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


_KERNELS = {"tpu": _Kernel(_why_not_splash, _splash), "cuda": _Kernel(_why_not_cudnn, _cudnn)}
