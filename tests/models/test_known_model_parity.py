"""The known models: logits and greedy tokens against transformers, token ids against plain references.

Weights come from ggml's own reader and dequantizers, under the names of ggml's own table. Models that are not
downloaded are skipped.
"""

import itertools
import pydoc_data.topics

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models import formats, known_models
from kvjax_models.formats.gguf_file import read_gguf
from kvjax_models.generation.generator import generate

pytestmark = pytest.mark.heavy

NEW_TOKENS = 64
TOLERANCE = 3e-4
PROMPT = pydoc_data.topics.topics["assert"] + pydoc_data.topics.topics["integers"]
UNICODE_LINES = (
    "  two  spaces\tand a tab",
    "na\u00efve caf\u00e9 \u2013 \u65e5\u672c\u8a9e \U0001f600\U0001f9d1\u200d\U0001f680",
    "1234567 3.14 0x1F",
)
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(params=sorted(known_models.KNOWN_MODELS))
def path(request):
    """The file of a known model."""
    try:
        return known_models.find_model(request.param)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def transformers_config(fields):
    """The configuration of transformers for the metadata of a file."""
    transformers = pytest.importorskip("transformers")
    architecture = fields["general.architecture"]
    kind = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "gemma3": transformers.Gemma3TextConfig,
    }[architecture]
    values = {key.removeprefix(f"{architecture}."): value for key, value in fields.items()}
    rope = {"rope_type": "default", "rope_theta": values["rope.freq_base"]}
    options = {"rope_parameters": rope, "tie_word_embeddings": fields["tied"], "vocab_size": fields["vocabulary"]}
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": 10000.0}
        options["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
        options |= {"sliding_window": values["attention.sliding_window"], "query_pre_attn_scalar": 256}
    if "attention.key_length" in values:
        options["head_dim"] = values["attention.key_length"]
    return kind(
        hidden_size=values["embedding_length"],
        intermediate_size=values["feed_forward_length"],
        num_hidden_layers=values["block_count"],
        num_attention_heads=values["attention.head_count"],
        num_key_value_heads=values["attention.head_count_kv"],
        max_position_embeddings=values["context_length"],
        rms_norm_eps=values["attention.layer_norm_rms_epsilon"],
        **options,
    )


def transformers_model(path):
    """The model of a file in transformers, in float32."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    fields |= {"tied": "output.weight" not in tensors, "vocabulary": tensors["token_embd.weight"].data.shape[0]}
    config = transformers_config(fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    architecture = fields["general.architecture"]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    unused = set(tensors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            unused.remove(stored)
            values = gguf.quants.dequantize(tensors[stored].data, tensors[stored].tensor_type)
            projection = name.split(".")[-2]
            if architecture == "llama" and projection in heads:  # rotated pairs are (2i, 2i + 1)
                pairs = values.reshape(heads[projection], -1, 2, values.shape[-1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            if architecture == "gemma3" and name.endswith("norm.weight"):
                values = values - 1
            parameter.copy_(torch.from_numpy(np.array(values)).reshape(parameter.shape))
    assert not unused
    return model


def test_logits_and_greedy_tokens_are_those_of_transformers(path):
    torch = pytest.importorskip("torch")
    prompt = formats.load_tokenizer(path).encode(PROMPT)
    assert len(prompt) > 600  # more than a sliding window
    model = transformers_model(path)
    with torch.no_grad():
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        tokens = model.generate(torch.tensor([prompt]), pad_token_id=0, **options)
        expected = model(tokens).logits.numpy()
    del model  # two models of 1.5 billion parameters need 12 GB
    llm = formats.load_model(path, "float32")
    logits = nnx.jit(lambda model, tokens: model(tokens))(llm, jnp.asarray(tokens.numpy()))
    error = np.abs(np.asarray(logits) - expected).max()
    print(f"{path.name}: largest difference of logits {error:.1e}, standard deviation {expected.std():.1f}")
    assert error < TOLERANCE
    rows, _ = generate(llm, kvjax.Exact(), [prompt], max_new_tokens=NEW_TOKENS)
    assert rows[0] == tokens[0, len(prompt) :].tolist()


def merge(symbols, rank):
    """Merges adjacent symbols, the pair of the lowest rank first, until `rank` is None for all pairs."""
    symbols = list(symbols)
    while True:
        ranks = [rank(*pair) for pair in itertools.pairwise(symbols)]
        if all(value is None for value in ranks):
            return symbols
        best = min(range(len(ranks)), key=lambda i: float("inf") if ranks[i] is None else ranks[i])
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]


def byte_letters():
    """GPT-2's character for every byte: printable ones stand for themselves, others follow from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def byte_level_tokens(metadata, text):
    """Tokens of byte-level BPE as GPT-2 defines it."""
    regex = pytest.importorskip("regex")
    letters = byte_letters()
    ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(metadata["tokenizer.ggml.merges"])}
    if metadata["tokenizer.ggml.pre"] == "qwen2":
        words = regex.findall(QWEN_WORDS, text)
    else:  # digits first
        words = [word for part in regex.findall(r"\p{N}|\P{N}+", text) for word in regex.findall(WORDS, part)]
    for word in words:
        yield from merge((letters[byte] for byte in word.encode()), lambda a, b: ranks.get((a, b)))


def sentencepiece_tokens(metadata, text):
    """Tokens of SentencePiece's BPE: the best score first; user-defined pieces before; bytes for unknown ones."""
    regex = pytest.importorskip("regex")
    pieces = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    ranks = {piece: -score for piece, score in zip(pieces, metadata["tokenizer.ggml.scores"].tolist(), strict=True)}
    defined = sorted((piece for piece, kind in zip(pieces, kinds, strict=True) if kind in (3, 4)), key=len)
    pattern = "|".join(regex.escape(piece) for piece in reversed(defined))
    for part in regex.split(f"({pattern})", text):
        if part in ranks and regex.fullmatch(pattern, part):
            yield part
            continue
        for symbol in merge(part.replace(" ", "\u2581"), lambda a, b: ranks.get(a + b)):
            yield from [symbol] if symbol in ranks else [f"<0x{byte:02X}>" for byte in symbol.encode()]


def test_token_ids_are_those_of_a_plain_reference(path):
    tokenizer, metadata = formats.load_tokenizer(path), read_gguf(path).metadata
    reference = {"gpt2": byte_level_tokens, "llama": sentencepiece_tokens}[metadata["tokenizer.ggml.model"]]
    ids = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    for line in [*PROMPT.splitlines()[:60], *UNICODE_LINES]:
        expected = [ids[token] for token in reference(metadata, line)]
        assert tokenizer.encode(line, add_bos=False) == expected, line
        assert tokenizer.decode(expected) == line
