"""Models with random weights for measurements of speed and memory."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jaxtyping import Float

from kvjax_models import LanguageModel
from kvjax_models.formats import huggingface
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.config import LlamaConfig, RopeConfig
from kvjax_models.model.llama import Llama
from kvjax_models.model.rotary import RopeScaling
from kvjax_models.profile import FRACTIONS, Profile

SMALL = LlamaConfig(
    vocab_size=8192, width=512, mlp_width=1408, layers=8, query_heads=8, kv_heads=2, head_dim=64, max_length=65536
)
# https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct
LLAMA_8B = LlamaConfig(
    vocab_size=128256, width=4096, mlp_width=14336, layers=32, query_heads=32, kv_heads=8, head_dim=128,
    max_length=131072, rope=RopeConfig(theta=500000.0, scaling=RopeScaling("llama3", 8.0)),
)  # fmt: skip
SHAPES = {
    "small": SMALL,
    "small-ungrouped": dataclasses.replace(SMALL, kv_heads=SMALL.query_heads),
    # https://huggingface.co/togethercomputer/LLaMA-2-7B-32K
    "llama-2-7b-32k": LlamaConfig(
        vocab_size=32000, width=4096, mlp_width=11008, layers=32, query_heads=32, kv_heads=32, head_dim=128,
        max_length=32768, rope=RopeConfig(scaling=RopeScaling("linear", 8.0)),
    ),
    "llama-3.1-8b": LLAMA_8B,
    # https://huggingface.co/meta-llama/Llama-3.1-70B-Instruct and Llama-3.1-405B-Instruct
    "llama-3.1-70b": dataclasses.replace(LLAMA_8B, width=8192, mlp_width=28672, layers=80, query_heads=64),
    "llama-3.1-405b": dataclasses.replace(LLAMA_8B, width=16384, mlp_width=53248, layers=126, query_heads=128),
}  # fmt: skip


def find_shape(name: str) -> LlamaConfig:
    """Returns the sizes of a model.

    Args:
        name: a name in `SHAPES`, or a directory with a config.json.

    Returns:
        The configuration.

    Raises:
        ValueError: if it is neither.
    """
    if name in SHAPES:
        return SHAPES[name]
    directory = pathlib.Path(name)
    directory = directory.parent if directory.name == "config.json" else directory
    if not (directory / "config.json").is_file():
        raise ValueError(f"--shape={name} is neither a directory with a config.json nor one of {', '.join(SHAPES)}")
    return huggingface.load_config(directory)


def first_layers(config: LlamaConfig, layers: int | None) -> LlamaConfig:
    """Returns the configuration of a model with only the first layers; of the same model for None."""
    if layers is None:
        return config
    attention = dataclasses.replace(config.attention, windows=config.attention.windows[:layers])
    return dataclasses.replace(config, layers=layers, attention=attention)


def zero_scorer(config: LlamaConfig) -> Float[np.ndarray, "L W+2 H_kv"]:
    """Returns a scorer that gives all tokens equal scores, for measurements that do not depend on them."""
    return np.zeros((config.layers, config.width + 2, config.kv_heads), np.float32)


class UnscoredModel(LanguageModel):
    """A model with a drawn profile, for measurements of time and bytes that do not depend on answers.

    All tokens have equal scores. The ranking of the heads is random, but fixed for a configuration, so that the
    heads that keep every token are spread over the layers: how many of them a layer has changes the time of a step.
    """

    def scorer(self, heads: object = None) -> Float[np.ndarray, "L W+2 H_kv"]:
        """Returns a scorer that gives all tokens equal scores."""
        return zero_scorer(self.model.config)

    def profile(self, *, scorer: bool = False) -> Profile:
        """Returns the drawn profile."""
        config = self.model.config
        needs = np.random.default_rng(0).permutation(config.layers * config.kv_heads) + 1.0
        needs = (needs / needs.sum() * needs.size).reshape(config.layers, config.kv_heads).astype(np.float32)
        fractions = np.asarray(FRACTIONS, np.float32)
        return Profile(
            head_needs=np.minimum(fractions[:, None, None] * needs, 1),
            kept_mass=fractions,
            scorer=zero_scorer(config),
            query_moments=np.zeros((config.layers, config.kv_heads, config.head_dim, config.head_dim), np.float32),
            query_means=np.zeros((config.layers, config.query_heads, config.head_dim), np.float32),
            query_norms=np.zeros((config.layers, config.query_heads), np.float32),
        )


def random_model(
    config: LlamaConfig, dtype: jax.typing.DTypeLike, seed: int = 0, *, is_abstract: bool = False
) -> UnscoredModel:
    """Returns a model with random weights, or with shapes only, and a tokenizer without vocabulary."""
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), (), (), {})

    def make() -> Llama:
        return Llama(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed))

    return UnscoredModel(nnx.eval_shape(make) if is_abstract else make(), tokenizer)
