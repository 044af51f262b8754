"""A model whose next token depends on the current one alone, with a tokenizer of known pieces of text."""

import itertools

import jax.numpy as jnp
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers

from kvjax_models import LanguageModel
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.server.answers import byte_level_characters

EOS = "<|end_of_text|>"
LETTER = {byte: character for character, byte in byte_level_characters().items()}


def make_llm(chains, template=None, broken=(), max_length=512):
    """Returns a model in which each piece of a chain follows the one before it.

    Args:
        chains: lists of pieces as bytes, in which no piece occurs twice; None finishes the text.
        template: chat template.
        broken: pieces after which logits are NaN.
        max_length: context length.
    """
    pieces = dict.fromkeys([bytes([byte]) for byte in range(256)])
    pieces |= dict.fromkeys(piece for chain in chains for piece in chain if piece is not None)
    vocabulary = {"".join(LETTER[byte] for byte in piece): number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    size, number = len(vocabulary) + 1, {piece: index for index, piece in enumerate(pieces)}
    number[None] = size - 1
    config = LlamaConfig(
        vocab_size=size, width=size, mlp_width=8, layers=1, query_heads=2, kv_heads=1, head_dim=8,
        max_length=max_length, tied_embeddings=False,
    )  # fmt: skip
    llama = Llama(config, rngs=nnx.Rngs(0))
    layer = llama.layers[0]
    for kernel in (layer.attention.output.kernel, layer.mlp.down.kernel):
        kernel[...] = jnp.zeros_like(kernel[...])
    embedding, head = jnp.eye(size), jnp.zeros((size, size))
    for chain in chains:
        for piece, following in itertools.pairwise(chain):
            head = head.at[number[piece], number[following]].set(10.0)
    for piece in broken:
        embedding = embedding.at[number[piece]].set(jnp.nan)
    llama.embedding.embedding[...], llama.head.kernel[...] = embedding, head
    tokenizer = Tokenizer(backend, (), (size - 1,), {"eos_token": EOS}, template)
    return LanguageModel(llama, tokenizer)
