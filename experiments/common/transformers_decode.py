"""Decoding speed of transformers with each of its caches, filled at random; run by `decode_speed` as a script.

    python transformers_decode.py CHECKPOINT CONTEXT TOKENS REPETITIONS THREADS

It prints one JSON object: seconds per token of every repetition, by cache. It imports torch and transformers alone, so
any interpreter that has them can run it; exit status 3 says that this one has not.
"""

import json
import sys
import time

try:
    import torch
    import transformers
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)


def main(checkpoint: str, context: int, tokens: int, repetitions: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    capacity = context + tokens * (repetitions + 1)
    caches = {
        "transformers DynamicCache": lambda: transformers.DynamicCache(config=model.config),
        "transformers StaticCache": lambda: transformers.StaticCache(config=model.config, max_cache_len=capacity),
    }
    print(json.dumps({name: measure(model, make(), context, tokens, repetitions) for name, make in caches.items()}))


def measure(model, cache, context: int, tokens: int, repetitions: int) -> list[float]:
    config = model.config
    torch.manual_seed(1)
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape), torch.randn(shape), layer, {"cache_position": torch.arange(context)})
    token = torch.zeros(1, 1, dtype=torch.long)
    position = context
    times = []
    for repetition in range(repetitions + 1):
        begin = time.perf_counter()
        for _ in range(tokens):
            places = torch.tensor([position])
            logits = model(token, past_key_values=cache, cache_position=places, position_ids=places[None]).logits
            token = logits[:, -1:].argmax(-1)
            position += 1
        if repetition:  # the first warms up
            times.append((time.perf_counter() - begin) / tokens)
    return times


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
