"""A tiny random model with a tokenizer of ASCII characters, in memory and as a Hugging Face directory."""

import atexit
import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile
from string import ascii_letters

import jax
import tokenizers
from flax import nnx
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kvjax_models import LanguageModel
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model import config
from kvjax_models.model.llama import Llama
from tests.models.huggingface_files import save_model

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make_backend():
    """Returns a tokenizer with a token per printable ASCII character or line break, and BOS before every text.

    Random tokens are valid text, so decoding and encoding again changes nothing.
    """
    alphabet = ["\u0120", "\u010a", *map(chr, range(33, 127))]  # a space and a line break, as `ByteLevel` writes them
    backend = tokenizers.Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return backend


def make_sentencepiece_backend():
    """Returns a tokenizer of as many tokens with SentencePiece's dummy prefix, like those of Llama 2 and Mistral.

    Its tokens are letters, and words of one letter with a space before them.
    """
    pieces = ["\u2581", *(prefix + letter for letter in ascii_letters[:47] for prefix in ("", "\u2581"))]
    vocabulary = {piece: number for number, piece in enumerate([EOS, BOS, "\n", *pieces])}
    merges = [("\u2581", piece[1]) for piece in pieces if len(piece) == 2]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([BOS, EOS])
    return backend


def make_config(**changes):
    """Returns the configuration of the model; `changes` are named as in `config.make_config`, or groups."""
    sizes = {"vocab_size": 98, "width": 32, "mlp_width": 48, "layers": 2, "query_heads": 4, "kv_heads": 2}
    return config.make_config(sizes | {"head_dim": 16, "max_length": 8192} | changes)


def make_llm(template=None, seed=1, backend=None, **changes):
    """Returns the model with its tokenizer."""
    backend = backend or make_backend()
    bos, eos = backend.token_to_id(BOS), backend.token_to_id(EOS)
    tokenizer = Tokenizer(backend, (bos,), (eos,), {"bos_token": BOS, "eos_token": EOS}, template)
    return LanguageModel(Llama(make_config(**changes), rngs=nnx.Rngs(seed)), tokenizer)


def make_lively_llm(template=TEMPLATE, seed=2, **changes):
    """Returns a model whose greedy texts have many different tokens and no end, so that a wrong cache changes them."""
    llm = make_llm(template, seed, **changes)
    graph, parameters = nnx.split(llm.model)
    model = nnx.merge(graph, jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, parameters))
    return LanguageModel(model, dataclasses.replace(llm.tokenizer, eos_ids=()))


def write(directory, seed=1, template=None, **changes):
    """Writes the model and its tokenizer as a Hugging Face directory."""
    backend = make_backend()
    ids = {"bos_token_id": backend.token_to_id(BOS), "eos_token_id": backend.token_to_id(EOS)}
    save_model(directory, Llama(make_config(**changes), rngs=nnx.Rngs(seed)), **ids)
    backend.save(str(directory / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    if template is not None:
        values["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return directory


@functools.cache
def directory(template=None):
    """Returns a directory with the model, which must not be changed."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="kvjax-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return write(path, template=template)
