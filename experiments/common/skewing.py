"""What InfiniGen's offline skew is, and how well few dimensions foretell the largest logits."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from experiments.common import streams
from kvjax.policies.infinigen import chosen_columns
from kvjax_models.llama import Llama
from kvjax_models.tokenizer import Tokenizer

ASKED = 64  # queries per document that recall is measured for


def calibrate(
    model: Llama, tokenizer: Tokenizer, seeds: Sequence[int], tokens: int
) -> tuple[Float[np.ndarray, "L H_kv D D"], Float[np.ndarray, "L H_kv D"]]:
    """Right singular vectors, as columns, and singular values of every layer's and kv head's queries."""
    turns, sizes = [], []
    layers = streams.prompt_streams(model, tokenizer, seeds, tokens, tokens)
    for _, drawn in tqdm(layers, total=model.config.layers, desc="queries", leave=False):
        heads, head_dim = drawn.keys.shape[2:]
        grouped = np.asarray(drawn.queries, np.float64).reshape(-1, heads, model.config.query_heads // heads, head_dim)
        moments = np.einsum("nhgd,nhge->hde", grouped, grouped)
        # Eigenvectors of the moments are the right singular vectors; eigenvalues come in rising order.
        values, vectors = np.linalg.eigh(moments)
        turns.append(vectors[..., ::-1])
        sizes.append(np.sqrt(np.maximum(values[..., ::-1], 0)))
    return np.stack(turns).astype(np.float32), np.stack(sizes).astype(np.float32)


@jax.jit(static_argnums=(3, 4))
def speculated(
    turns: Float[Array, "H_kv D D"],
    keys: Float[Array, "R H_kv n D"],
    queries: Float[Array, "R H_kv n G D"],
    columns: int,
    top: int,
) -> Float[Array, "R"]:
    """The share of the `top` tokens with the largest logits that are among as many with the largest speculated ones:
    the mean over heads and each document's last queries."""

    def one(turn: Float[Array, "D D"], keys: Float[Array, "n D"], queries: Float[Array, "n G D"]) -> Float[Array, ""]:
        partial = chosen_columns(turn, queries, jnp.ones(queries.shape[0], bool), columns)
        asked = queries[-ASKED:].reshape(-1, queries.shape[-1])
        best = jax.lax.top_k(asked @ keys.T, top)[1]
        speculated = jax.lax.top_k((asked @ partial) @ (keys @ partial).T, top)[1]
        return jnp.mean((best[:, :, None] == speculated[:, None]).any(axis=2))

    return jnp.mean(jax.vmap(jax.vmap(one), in_axes=(None, 0, 0))(turns, keys, queries), axis=1)
