"""A byte-pair tokenizer of Llama 3's form, trained on the texts that the language model is trained on.

Llama 3's pre-tokenization over bytes, and as there every group of up to three digits is one token: a number is read in
groups from the left, so 24169 is 241|69.
"""

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from experiments.common.tasks.line_tokenizer import BOS, EOS

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Of two and three digits; single digits are bytes.
_DIGIT_GROUPS = tuple(f"{number:0{digits}d}" for digits in (2, 3) for number in range(10**digits))
_FEWEST_TOKENS = 256 + len(_DIGIT_GROUPS) + len((BOS, EOS))


def train(texts: Iterable[str], size: int) -> tokenizers.Tokenizer:
    """A tokenizer of `size` tokens: bytes, digit groups, BOS, EOS, and as many merges learnt from the texts as then
    fit. A text begins with BOS.

    Raises:
        ValueError: for a size that does not hold what comes without merges, or that the texts are too few for.
    """
    if size < _FEWEST_TOKENS:
        raise ValueError(f"size={size}; bytes, digit groups, {BOS} and {EOS} alone are {_FEWEST_TOKENS}")
    split = pre_tokenizers.Split(tokenizers.Regex(_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary, merges = _learn_merges(texts, [split, byte_level], size - _FEWEST_TOKENS)
    vocabulary |= {group: len(vocabulary) + number for number, group in enumerate(_DIGIT_GROUPS)}

    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"size={size}; the texts have merges for {tokenizer.get_vocab_size()} tokens only")
    return tokenizer


def _learn_merges(
    texts: Iterable[str], parts: list[pre_tokenizers.PreTokenizer], count: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The 256 bytes and what `count` merges make of them, and the merges, from all of the texts but their digits."""
    learner = tokenizers.Tokenizer(models.BPE())
    no_digits = pre_tokenizers.Split(tokenizers.Regex(r"\p{N}+"), behavior="removed")
    learner.pre_tokenizer = pre_tokenizers.Sequence([no_digits, *parts])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + count, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    return learnt["vocab"], [tuple(merge) for merge in learnt["merges"]]
