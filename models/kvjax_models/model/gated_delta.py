"""Linear attention by the gated delta rule, in the layers of hybrid models (Qwen3-Next, Qwen3.5) without attention.

Every value head has a state S [D_k, D_v] of fixed size in place of keys and values. A token decays the state, reads the
value that it has for the token's key, and writes a share of the difference to the token's value:

    S <- exp(g) S;    S <- S + beta k (v - S^T k)^T;    o = S^T q

Keys, queries and values first pass a short causal convolution over the tokens, so that the state of a sequence also has
the inputs of the last tokens. Decoding computes one token in this form. Prefill computes chunks of tokens:

1. Within a chunk, the writes of the tokens depend on each other through a unit triangular matrix I + A, where
   A[i, j] = beta_i exp(g_j+1 + ... + g_i) k_i.k_j for j < i (the WY form of products of I - beta k k^T).
2. Its inverse gives all writes of the chunk, up to the part that the chunk's first state predicts.
3. A scan over chunks subtracts this part, adds the writes to the state, and computes the outputs.

The state cannot be cut back to an earlier token. It belongs to a row like the row's caches.

Reference:
    Yang et al. 2412.06464 (Gated DeltaNet), Yang et al. 2406.06484 (the chunked form); sizes and gates as in
    transformers 5.24.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.state import state
from kvjax_models.model.parameters import Initializer
from kvjax_models.model.short_convolution import convolve, last_inputs

CHUNK = 64  # tokens whose writes one triangular matrix combines

# TPUs and GPUs would otherwise round operands to fewer bits, and errors in a state stay for the rest of a sequence.
_einsum = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


@state
class DeltaState:
    """The state of the rows of a batch in one layer.

    Attributes:
        inputs: inputs of the convolution of the last tokens, zeros before the first one, in the dtype of the model.
        memory: the state of every value head, by key head, float32.
    """

    inputs: Float[Array, "B t H C"]
    memory: Float[Array, "B H G K V"]


@dataclasses.dataclass(frozen=True)
class GatedDeltaSizes:
    """The sizes of a layer.

    Attributes:
        key_heads: number of heads of queries and keys.
        value_heads: number of heads of values; consecutive ones share a key head.
        key_dim: dimension of a query or key.
        value_dim: dimension of a value.
        kernel_size: tokens that the convolution spans.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: if value heads cannot share key heads evenly.
        """
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads={self.value_heads} must be a multiple of key_heads={self.key_heads}")

    @property
    def group_size(self) -> int:
        """Number of value heads per key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Inputs of the convolution per key head: a query, a key and the values of its heads."""
        return 2 * self.key_dim + self.group_size * self.value_dim

    def init_state(self, batch: int, dtype: jax.typing.DTypeLike) -> DeltaState:
        """Returns the state of sequences without tokens.

        Args:
            batch: number of batch rows.
        """
        memory = (batch, self.key_heads, self.group_size, self.key_dim, self.value_dim)
        return DeltaState(
            inputs=jnp.zeros((batch, self.kernel_size - 1, self.key_heads, self.channels), dtype),
            memory=jnp.zeros(memory, jnp.float32),
        )


class GatedDeltaNet(nnx.Module):
    """Projections, convolution and gates around the gated delta rule."""

    def __init__(self, width: int, sizes: GatedDeltaSizes, norm_epsilon: float, init: Initializer):
        """Creates the parameters.

        Args:
            width: size of input and output.
        """
        self.sizes, self.norm_epsilon = sizes, norm_epsilon
        heads, group, values = sizes.key_heads, sizes.group_size, sizes.value_heads * sizes.value_dim
        # Each key head with its query, key, values and output gates, so that devices get entire heads.
        outputs = (heads, sizes.channels + group * sizes.value_dim)
        self.qkvz = init.linear(width, outputs, use_bias=False)
        self.ba = init.float_linear(width, (heads, 2 * group), use_bias=False)
        self.convolution = init.normal((sizes.kernel_size, heads, sizes.channels), sizes.kernel_size**-0.5)
        self.log_rate = init.zeros(sizes.value_heads)
        self.decay_bias = init.ones(sizes.value_heads)
        self.scale = init.ones(sizes.value_dim)
        self.out = init.linear(values, width, use_bias=False)

    def __call__(
        self, x: Float[Array, "B T W"], state: DeltaState, lengths: Int[Array, "B"]
    ) -> tuple[Float[Array, "B T W"], DeltaState]:
        """Processes the next tokens of each row.

        Args:
            x: normalized residual stream of padded tokens.
            state: state before the tokens.
            lengths: number of tokens of each row; padding does not change the state.

        Returns:
            The output and the state after the tokens.
        """
        sizes = self.sizes
        batch, tokens, _ = x.shape
        values_shape = (batch, tokens, sizes.key_heads, sizes.group_size, sizes.value_dim)
        qkvz = self.qkvz(x)
        entire = jnp.concatenate([state.inputs, qkvz[..., : sizes.channels]], axis=1)
        mixed = jax.nn.silu(convolve(entire, self.convolution[...]))
        inputs = last_inputs(entire, lengths, sizes.kernel_size - 1)
        query, key = mixed[..., : sizes.key_dim], mixed[..., sizes.key_dim : 2 * sizes.key_dim]
        values = mixed[..., 2 * sizes.key_dim :].reshape(values_shape)
        beta, decay = jnp.split(self.ba(x).astype(jnp.float32), 2, axis=-1)
        decay_bias, log_rate = (
            x[...].astype(jnp.float32).reshape(decay.shape[2:]) for x in (self.decay_bias, self.log_rate)
        )
        log_decay = -jnp.exp(log_rate) * jax.nn.softplus(decay + decay_bias)
        is_token = (jnp.arange(tokens) < lengths[:, None])[..., None, None]
        outputs, memory = gated_delta_rule(
            _normalize(query) * sizes.key_dim**-0.5,
            _normalize(key),
            values,
            jnp.where(is_token, jax.nn.sigmoid(beta), 0),
            jnp.where(is_token, log_decay, 0),
            state.memory,
        )
        gate = qkvz[..., sizes.channels :].reshape(values_shape).astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.mean(jnp.square(outputs), axis=-1, keepdims=True) + self.norm_epsilon)
        outputs = outputs * factor * self.scale[...].astype(jnp.float32) * jax.nn.silu(gate)
        return self.out(outputs.astype(x.dtype).reshape(batch, tokens, -1)), DeltaState(inputs, memory)

    def init_state(self, batch: int) -> DeltaState:
        """Returns the state of sequences without tokens, for a number of batch rows."""
        return self.sizes.init_state(batch, self.scale[...].dtype)


def gated_delta_rule(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T H K"],
    values: Float[Array, "B T H G V"],
    beta: Float[Array, "B T H G"],
    log_decay: Float[Array, "B T H G"],
    memory: Float[Array, "B H G K V"],
) -> tuple[Float[Array, "B T H G V"], Float[Array, "B H G K V"]]:
    """Reads and writes the states of all heads; all arrays are float32.

    Args:
        query: scaled queries.
        key: keys with a norm of at most 1.
        beta: share of each write, from 0 to 1. Tokens with beta 0 and log decay 0 do not change the state.
        log_decay: logarithm of the decay before each token, at most 0.
        memory: states before the tokens.

    Returns:
        The outputs and the states after the tokens.
    """
    tokens = query.shape[1]
    if tokens == 1:
        outputs, memory = _step(query[:, 0], key[:, 0], values[:, 0], beta[:, 0], log_decay[:, 0], memory)
        return outputs[:, None], memory
    size = min(CHUNK, 1 << (tokens - 1).bit_length())

    def split(x: Array) -> Array:
        """Returns x [B, T, H, ...] in chunks of padded tokens, [chunks, B, H, C, ...]."""
        padded = jnp.pad(x, ((0, 0), (0, -tokens % size), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(x.shape[0], -1, size, *x.shape[2:]), (1, 3), (0, 2))

    chunks = _Chunk.make(*map(split, (query, key, values, beta, log_decay)))
    memory, outputs = jax.lax.scan(lambda memory, chunk: chunk.apply(memory), memory, chunks)
    # [chunks, B, H, G, C, V] to [B, T, H, G, V]
    outputs = jnp.moveaxis(outputs, (0, 4), (1, 2))
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])[:, :tokens], memory


def _step(
    query: Float[Array, "B H K"],
    key: Float[Array, "B H K"],
    values: Float[Array, "B H G V"],
    beta: Float[Array, "B H G"],
    log_decay: Float[Array, "B H G"],
    memory: Float[Array, "B H G K V"],
) -> tuple[Float[Array, "B H G V"], Float[Array, "B H G K V"]]:
    """Computes one token as `gated_delta_rule`; sums of products instead of matrix products read the state once."""
    memory = memory * jnp.exp(log_decay)[..., None, None]
    key, query = key[:, :, None, :, None], query[:, :, None, :, None]
    writes = beta[..., None] * (values - jnp.sum(memory * key, axis=-2))
    memory = memory + key * writes[..., None, :]
    return jnp.sum(memory * query, axis=-2), memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Matrices that give the outputs and the last state of a chunk as functions of its first state S.

    With the decay d_i from the start of the chunk up to token i, and D at its end:

        writes = new - seen S;    outputs = reads S + scores writes;    S' = D S + keys^T writes
    """

    new: Float[Array, "*N B H G C V"]
    seen: Float[Array, "*N B H G C K"]
    reads: Float[Array, "*N B H G C K"]  # d_i q_i
    scores: Float[Array, "*N B H G C C"]  # d_i / d_j q_i.k_j for j <= i
    keys: Float[Array, "*N B H G C K"]  # D / d_i k_i
    decay: Float[Array, "*N B H G"]  # D

    @classmethod
    def make(cls, query: Array, key: Array, values: Array, beta: Array, log_decay: Array) -> "_Chunk":
        """Computes all chunks [N, B, H, C, ...] of the arguments of `gated_delta_rule`."""
        values, beta, log_decay = (jnp.moveaxis(x, 4, 3) for x in (values, beta, log_decay))
        summed = jnp.cumsum(log_decay, axis=-1)
        index = jnp.arange(key.shape[3])
        is_causal = index[:, None] >= index
        # Masked before the exponential: differences are positive, and may overflow, for later tokens only.
        difference = jnp.where(is_causal, summed[..., :, None] - summed[..., None, :], -jnp.inf)
        pairwise = jnp.exp(difference)
        products = _einsum("nbhik,nbhjk->nbhij", key, key)[:, :, :, None]
        inverse = _invert_unit_lower(jnp.where(index[:, None] > index, beta[..., None] * products * pairwise, 0))
        inverse = inverse * beta[..., None, :]
        decay = jnp.exp(summed)[..., None]
        keys, queries = key[:, :, :, None], query[:, :, :, None]
        return cls(
            new=_einsum("nbhgij,nbhgjv->nbhgiv", inverse, values),
            seen=_einsum("nbhgij,nbhgjk->nbhgik", inverse, keys * decay),
            reads=queries * decay,
            scores=_einsum("nbhik,nbhjk->nbhij", query, key)[:, :, :, None] * pairwise,
            keys=keys * jnp.exp(summed[..., -1:] - summed)[..., None],
            decay=jnp.exp(summed[..., -1]),
        )

    def apply(self, memory: Float[Array, "B H G K V"]) -> tuple[Array, Array]:
        """Returns the state after the chunk and its outputs [B, H, G, C, V], given the state before it."""
        writes = self.new - _einsum("bhgck,bhgkv->bhgcv", self.seen, memory)
        outputs = _einsum("bhgck,bhgkv->bhgcv", self.reads, memory)
        outputs = outputs + _einsum("bhgij,bhgjv->bhgiv", self.scores, writes)
        added = _einsum("bhgck,bhgcv->bhgkv", self.keys, writes)
        return memory * self.decay[..., None, None] + added, outputs


def _invert_unit_lower(lower: Float[Array, "N *M C C"]) -> Float[Array, "N *M C C"]:
    """Returns the inverse of I + `lower` for strictly lower triangular matrices; C is a power of two.

    The inverses of the two halves of the diagonal give the remaining quarter by products, which accelerators and the
    compiler's sharding handle better than substitution. A series of powers of `lower` would cancel catastrophically for
    equal keys.
    """
    size = lower.shape[-1]
    if size == 1:
        return jnp.ones_like(lower)
    half = size // 2
    quarter = lower[..., half:, :half]
    halves = jnp.concatenate([lower[..., :half, :half], lower[..., half:, half:]])
    first, last = jnp.split(_invert_unit_lower(halves), 2)
    corner = -_einsum("...ij,...jk,...kl->...il", last, quarter, first)
    upper = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, last], axis=-1)], axis=-2)


def _normalize(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """Returns vectors divided by their norm."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
