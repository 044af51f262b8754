"""What all forms of attention to recalled blocks take, and how a token lies in a block."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import packing

# A TPU fetches a block where it lies only if its rows fill whole registers, of 128 lanes: a key and its value together
# do so where each takes a multiple of half as many. Head dimensions below that (of toy models) are not padded.
LANES = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks that attention reads some of: N per kv head, of P places, a token's key and value side by side.

    A row holds the key in its first D columns, the value in the first D_v of its second half, and finite numbers
    elsewhere; so do places that hold no token. Rows of packed numbers (see `packing`) hold bytes in the columns' place.
    """

    # float32, bfloat16, float16, int8 or float8, or uint8 where there are bits; W is at least D and D_v.
    entries: Float[Array, "B H_kv N P 2*W"]
    scale: Float[Array, "B H_kv N P 2"] | None = None  # finite factors of a quantised key and value; None: one
    value_dim: int | None = dataclasses.field(default=None, metadata={"static": True})  # D_v; None: D
    logit_cap: float | None = dataclasses.field(default=None, metadata={"static": True})  # as that of `Entries`
    key_bits: int | None = dataclasses.field(default=None, metadata={"static": True})  # both, or none
    value_bits: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def width(self) -> int:
        """W."""
        bits = (self.key_bits or 8) + (self.value_bits or 8)
        return self.entries.shape[-1] * 8 // bits

    @property
    def value_column(self) -> int:
        """Where in a row the value begins."""
        return packing.packed_width(self.width, self.key_bits)


def entry_width(head_dim: int) -> int:
    """W: how many columns a store sets aside for a key, and as many for a value."""
    return head_dim if head_dim < LANES else -(-head_dim // LANES) * LANES


def refuse_unknown(rows: Float[Array, "B H R D"], blocks: Blocks) -> None:
    """Raises a NotImplementedError for what no kernel does yet."""
    if blocks.logit_cap is not None:
        raise NotImplementedError(f"logit_cap={blocks.logit_cap}: XLA caps logits")
    if blocks.value_dim not in (None, rows.shape[3]):
        raise NotImplementedError(f"values of {blocks.value_dim} dimensions, keys of {rows.shape[3]}")


def check(
    rows: Float[Array, "B H R D"], blocks: Blocks, number: Int[Array, "B H K"], count: Int[Array, "B H K"]
) -> None:
    """Raises a ValueError where shapes do not fit."""
    batch, heads, _, head_dim = rows.shape
    entries, widest = blocks.entries.shape, max(head_dim, blocks.value_dim or 0)
    if len(entries) != 5 or entries[0] != batch or heads % entries[1] or entries[4] % 2 or blocks.width < widest:
        raise ValueError(
            f"entries have shape {entries}; with rows [B, H, R, D] = {rows.shape} it must be [B, H_kv, N, P, 2 W], H a "
            "multiple of H_kv and W at least D and D_v"
        )
    if blocks.scale is not None and blocks.scale.shape != (*entries[:4], 2):
        raise ValueError(f"scale has shape {blocks.scale.shape}; it must be [B, H_kv, N, P, 2] = {(*entries[:4], 2)}")
    for name, array in {"number": number, "count": count}.items():
        if array.ndim != 3 or array.shape[:2] != (batch, heads) or array.shape != number.shape or not array.shape[2]:
            raise ValueError(f"{name} has shape {array.shape}; it must be [B, H, K] = [{batch}, {heads}, K], K above 0")
