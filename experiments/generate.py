"""Continues a text with any supported checkpoint through any cache policy, as it is written.

python -m experiments.generate --model DIR --policy clustergen --budget 25% --prompt_file FILE
"""

import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags

import kvjax
from experiments.common import results, settings
from models import generate
from models.sampling import Sampling
from models.tokenizer import Streamer

settings.define_common(policies=("exact",), budgets=("25%",))
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "Text to continue; - for standard input.", required=True)
_CHAT = flags.DEFINE_bool("chat", False, "Send the text as a user's message, through the checkpoint's chat template.")
_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Most tokens to write.", lower_bound=1)
_STREAMING = flags.DEFINE_bool("streaming", False, "Read the text through the cache, in memory that does not grow.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most likely token.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Sample among so many of the most likely tokens.")
_TOP_P = flags.DEFINE_float("top_p", None, "Sample among the most likely tokens that hold this probability.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    chosen = settings.settings(flags.FLAGS.policy, flags.FLAGS.budget)
    if len(chosen) != 1:
        raise app.UsageError(f"give one policy and one budget, not {[str(one) for one in chosen]}")
    text = sys.stdin.read() if _PROMPT_FILE.value == "-" else pathlib.Path(_PROMPT_FILE.value).read_text("utf-8")
    model, tokenizer = settings.load_model(flags.FLAGS.model)
    prompt = tokenizer.apply_chat([{"role": "user", "content": text}]) if _CHAT.value else tokenizer.encode(text)
    sizes: dict[str, Any] = {
        "batch": 1,
        "max_prompt": max(len(prompt), 1),
        "max_new": _NEW_TOKENS.value,
        "streaming": _STREAMING.value,
    }
    spec = generate.cache_specs(model, **sizes)[0]
    generator = generate.Generator(
        model,
        chosen[0].build(spec, len(prompt) + _NEW_TOKENS.value),
        **sizes,
        sampling=Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value),
        eos=tokenizer.eos_ids,
    )
    begin = time.perf_counter()
    state = generator.read(generator.start(flags.FLAGS.seed), [prompt])
    state.logits.block_until_ready()
    prefilled = time.perf_counter()
    streamer = Streamer(tokenizer, context=prompt)
    written = 0
    for newest, tokens in generator.write(state, _NEW_TOKENS.value):
        state = newest
        for token in tokens[0]:
            sys.stdout.write(streamer.push(int(token)))
        sys.stdout.flush()
        written += tokens.shape[1]
    sys.stdout.write(streamer.flush() + "\n")
    seconds = time.perf_counter() - prefilled
    kvjax.check(state)
    held = kvjax.cache_bytes(state.layers)
    read = sum(policy.read_bytes(layer) for policy, layer in zip(generator.policies, state.layers, strict=True))
    exact = spec.exact_bytes(len(prompt) + written) * spec.layers
    print(
        f"[{chosen[0]}: {len(prompt)} tokens read in {prefilled - begin:.2f} s, {written} written at "
        f"{written / seconds:.1f} tokens/s (compilation included); cache {results.readable_bytes(held.device)} on the "
        f"device, {held.device / exact:.1%} of exact's, {results.readable_bytes(held.host)} on the host; "
        f"{results.readable_bytes(read)} read per token]",
        file=sys.stderr,
    )


if __name__ == "__main__":
    app.run(main)
