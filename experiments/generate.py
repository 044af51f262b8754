"""Continues a text with any supported checkpoint through any cache policy, as it is written.

    python -m experiments.generate --model DIR --policy clustergen --budget 25% --prompt_file FILE

A long run saves itself, and goes on where it was when it is started again:

    python -m experiments.generate --prompt_file FILE --save_dir RUN --save_every 256
    python -m experiments.generate --prompt_file FILE --save_dir RUN --save_every 256 --resume

A long text can be read and compressed once, and asked about many times:

    python -m experiments.generate --prompt_file TEXT --save_prefix READ --max_new_tokens 512
    python -m experiments.generate --prefix READ --prompt_file QUESTION1 --prompt_file QUESTION2 --max_new_tokens 64
"""

import dataclasses
import hashlib
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging
from kvjax_models import generate
from kvjax_models.llama import Llama
from kvjax_models.sampling import Sampling
from kvjax_models.saved_states import SavedStates
from kvjax_models.tokenizer import Streamer, Tokenizer

import kvjax
from experiments.common import multihost, results, settings
from kvjax.registry import PolicyChoice

settings.define_common(policies=("exact",), budgets=("25%",))
_PROMPT_FILE = flags.DEFINE_multi_string(
    "prompt_file", None, "Text to continue; - for standard input. With --prefix repeatable: each continues it.",
    required=True,
)  # fmt: skip
_CHAT = flags.DEFINE_bool("chat", False, "Send the text as a user's message, through the checkpoint's chat template.")
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Most tokens to write.", lower_bound=1)
_STREAMING = flags.DEFINE_bool("streaming", False, "Read the text through the cache, in memory that does not grow.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most likely token.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Sample among so many of the most likely tokens.")
_TOP_P = flags.DEFINE_float("top_p", None, "Sample among the most likely tokens that hold this probability.")
_SAVE_DIR = flags.DEFINE_string("save_dir", None, "Where the run saves itself.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 256, "Tokens between two saves, in whole blocks.", lower_bound=1)
_RESUME = flags.DEFINE_bool("resume", False, "Go on where the newest save in --save_dir stands.")
_SAVE_PREFIX = flags.DEFINE_string(
    "save_prefix", None, "Read the text, save the compressed cache here and stop; --max_new_tokens is its room."
)
_PREFIX = flags.DEFINE_string("prefix", None, "Continue what --save_prefix saved here.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if _RESUME.value and _SAVE_DIR.value is None:
        raise app.UsageError("--resume needs --save_dir")
    if _PREFIX.value is not None and (_SAVE_DIR.value is not None or _SAVE_PREFIX.value is not None):
        raise app.UsageError("--prefix goes with neither --save_dir nor --save_prefix")
    if len(_PROMPT_FILE.value) > 1 and _PREFIX.value is None:
        raise app.UsageError("several --prompt_file go with --prefix only")
    chosen = settings.settings(flags.FLAGS.policy, flags.FLAGS.budget)
    if len(chosen) != 1:
        raise app.UsageError(f"give one policy and one budget, not {[settings.label(setting) for setting in chosen]}")
    logging.set_verbosity(logging.WARNING)  # orbax reports every step of every save
    model, tokenizer = settings.load_model(flags.FLAGS.model)
    if _PREFIX.value is not None:
        continue_prefix(SavedStates(_PREFIX.value), model, tokenizer, chosen[0])
    else:
        continue_text(model, tokenizer, chosen[0])


def continue_text(model: Llama, tokenizer: Tokenizer, setting: PolicyChoice) -> None:
    """Reads the text, and writes on; or reads and saves it."""
    prompt = encoded(tokenizer, _PROMPT_FILE.value[0])
    sizes = {"batch": 1, "max_prompt": max(len(prompt), 1), "max_new": _NEW_TOKENS.value, "streaming": _STREAMING.value}
    writer = generator(model, setting, tokenizer, sizes)
    saved = None if _SAVE_DIR.value is None else SavedStates(_SAVE_DIR.value)
    run = {
        "prompt": hashlib.sha256(repr(prompt).encode()).hexdigest(),
        "sampling": dataclasses.asdict(writer.sampling),
        "seed": flags.FLAGS.seed,
    }
    begin = time.perf_counter()
    written: list[int] = []
    if saved is not None and _RESUME.value:
        _, state, notes = saved.restore(writer, run)
        written = notes["tokens"]
    else:
        state = writer.read(writer.start(flags.FLAGS.seed), [prompt])
    state.logits.block_until_ready()
    prefilled = time.perf_counter()
    if _SAVE_PREFIX.value is not None:
        SavedStates(_SAVE_PREFIX.value).save(0, writer, state, notes={"tokens": len(prompt)})
        print(
            f"[{settings.label(setting)}: {len(prompt)} tokens read and saved; {held(writer, state)}]", file=sys.stderr
        )
        return
    streamer = Streamer(tokenizer, context=prompt)
    say("".join(streamer.push(token) for token in written))
    begun = safe = len(written)
    for newest, tokens in writer.write(state, _NEW_TOKENS.value - begun):
        state = newest
        for token in tokens[0].tolist():
            written.append(token)
            say(streamer.push(token))
        ends = len(written) == _NEW_TOKENS.value or bool(state.done.all())
        if saved is not None and (ends or len(written) - safe >= _SAVE_EVERY.value):
            saved.save(len(written), writer, state, run, {"tokens": written})
            safe = len(written)
    say(streamer.flush() + "\n")
    seconds = time.perf_counter() - prefilled
    kvjax.check(state)
    print(
        f"[{settings.label(setting)}: {len(prompt)} tokens "
        f"{'restored' if begun else 'read'} in {prefilled - begin:.2f} s, "
        f"{len(written) - begun} written at {(len(written) - begun) / seconds:.1f} tokens/s (compilation included); "
        f"{held(writer, state)}]",
        file=sys.stderr,
    )


def continue_prefix(saved: SavedStates, model: Llama, tokenizer: Tokenizer, setting: PolicyChoice) -> None:
    """Reads every text behind one saved prefix, all side by side, and writes on."""
    alone = generator(model, setting, tokenizer, saved.sizes())
    _, prefix, notes = saved.restore(alone)
    texts = _PROMPT_FILE.value
    many = generate.Generator(
        model,
        alone.policies,
        **{**saved.sizes(), "batch": len(texts)},
        sampling=alone.sampling,
        eos=alone.eos,
    )
    state = many.read(kvjax.repeat_rows(prefix, len(texts)), [encoded(tokenizer, text, follows=True) for text in texts])
    rows: list[list[int]] = [[] for _ in texts]
    for newest, tokens in many.write(state, _NEW_TOKENS.value):
        state = newest
        generate.collect(rows, tokens)
    kvjax.check(state)
    for text, row in zip(texts, rows, strict=True):
        say(f"== {text}\n{tokenizer.decode(row)}\n")
    print(
        f"[{settings.label(setting)}: {len(texts)} continuations of {notes['tokens']} tokens read before; "
        f"{held(many, state)}]",
        file=sys.stderr,
    )


def generator(model: Llama, setting: PolicyChoice, tokenizer: Tokenizer, sizes: dict[str, Any]) -> generate.Generator:
    spec = generate.cache_specs(model, **sizes)[0]
    policy = settings.fitted(setting, spec, sizes["max_prompt"] + sizes["max_new"])
    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    return generate.Generator(model, policy, **sizes, sampling=sampling, eos=tokenizer.eos_ids)


def encoded(tokenizer: Tokenizer, name: str, follows: bool = False) -> list[int]:
    """The tokens of a file, or of standard input.

    Args:
        follows: whether there is text before it.
    """
    text = sys.stdin.read() if name == "-" else pathlib.Path(name).read_text("utf-8")
    if _CHAT.value:
        return tokenizer.apply_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text, add_bos=not follows)


def say(text: str) -> None:
    """Writes a part of the text as soon as it is there, in the first process of a run."""
    if multihost.is_first():
        sys.stdout.write(text)
        sys.stdout.flush()


def held(generator: generate.Generator, state: generate.GenerationState) -> str:
    """What the caches of a sequence hold and read, in words."""
    bytes_held = kvjax.cache_bytes(state.layers)
    read = sum(map(kvjax.read_bytes, state.layers))
    tokens = int(state.positions.sum())
    exact = generator.specs[0].exact_bytes(tokens) * len(generator.specs)
    return (
        f"cache {results.readable_bytes(bytes_held.device)} on the device, {bytes_held.device / exact:.1%} of exact's, "
        f"{results.readable_bytes(bytes_held.host)} on the host; {results.readable_bytes(read)} read per token"
    )


if __name__ == "__main__":
    app.run(main)
