"""Tokens that end a turn or a text, recognized by their spelling.

Files often name the end of a text only, but the assistant of a chat model ends its turn with another token.

Reference:
    llama-vocab.cpp of llama.cpp, which recognizes these tokens in every GGUF file.
"""

from collections.abc import Collection

END_TOKENS = (
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",
    "<|im_end|>",  # ChatML: Qwen, SmolLM2, Phi-4
    "<|end|>",  # Phi-3
    "<end_of_turn>",  # Gemma
    "<turn|>",
    "<|return|>",  # gpt-oss
    "<|call|>",
    "<|calls|>",  # Solar
    "<|flush|>",
    "<end_of_utterance>",
    "<|tool_response>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\N{FULLWIDTH VERTICAL LINE}end\N{LOWER ONE EIGHTH BLOCK}of\N{LOWER ONE EIGHTH BLOCK}sentence"
    "\N{FULLWIDTH VERTICAL LINE}>",  # DeepSeek
    "<eos>",
    "</s>",
)
FILL_IN_THE_MIDDLE = (  # of code models: padding, the next repository, the next file
    ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)
# Vocabularies with the first two tokens have the third one within an answer.
_WITHIN_ANSWERS = (
    ("<|return|>", "<|call|>", "<|end|>"),
    ("<|call|>", "<|flush|>", "<|end|>"),
    ("<|calls|>", "<|flush|>", "<|end|>"),
    ("<|tool_response>", "<|tool_response>", "</s>"),
)


def find_end_tokens(vocabulary: Collection[str]) -> list[str]:
    """Returns the tokens of a vocabulary that end a turn or a text."""
    within_answers = {last for first, second, last in _WITHIN_ANSWERS if first in vocabulary and second in vocabulary}
    return [token for token in END_TOKENS if token in vocabulary and token not in within_answers]
