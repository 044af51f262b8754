"""The known models: logits and greedy tokens against transformers, token ids against plain references.

transformers reads the files itself. Models that are not downloaded are skipped.
"""

import itertools
import pydoc_data.topics

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models import formats, known_models
from kvjax_models.formats.gguf_file import read_gguf
from tests.models.chain import LETTER
from tests.models.loops import generate

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


def test_logits_and_greedy_tokens_are_those_of_transformers(path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    prompt = formats.load_tokenizer(path).encode(PROMPT)
    assert len(prompt) > 600  # more than a sliding window
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
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


def byte_level_tokens(metadata, text):
    """Tokens of byte-level BPE as GPT-2 defines it."""
    regex = pytest.importorskip("regex")
    ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(metadata["tokenizer.ggml.merges"])}
    if metadata["tokenizer.ggml.pre"] == "qwen2":
        words = regex.findall(QWEN_WORDS, text)
    else:  # digits first
        words = [word for part in regex.findall(r"\p{N}|\P{N}+", text) for word in regex.findall(WORDS, part)]
    for word in words:
        yield from merge((LETTER[byte] for byte in word.encode()), lambda a, b: ranks.get((a, b)))


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
        assert tokenizer.encode_continuation(line, context=()) == expected, line
        assert tokenizer.decode(expected) == line
