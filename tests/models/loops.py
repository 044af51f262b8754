"""Plain loops over the steps of a `Generator`, as references for the engine."""

import numpy as np

import kvjax
from kvjax_models import compile_cache
from kvjax_models.runner.decode import NO_TOKEN, Group, decode_groups
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import GREEDY
from kvjax_models.runner.state import check_faults, check_finite, commit_to_device, compact_layers


def decode(generator, state, max_tokens, stream_interval=None, *, compact_last=True, texts=None):
    """Yields the state and the new tokens [B, n] after every block, or a part of it."""
    generator.check_capacity(np.asarray(state.positions), np.where(np.asarray(state.done), 0, max_tokens))
    state = commit_to_device(state, generator.mesh)
    total = in_block = 0
    while total < max_tokens and not np.asarray(state.done).all():
        block_size = generator.block_size
        steps = min(stream_interval or block_size, block_size - in_block, max_tokens - total)
        group = Group(generator.split_model, state, texts)
        [state], [sampled] = decode_groups([group], generator.eos, block_size, steps)
        total, in_block = total + steps, in_block + steps
        check_finite(state)
        is_last = total == max_tokens or bool(np.asarray(state.done).all())
        if (is_last and compact_last) or in_block == block_size:
            state, in_block = compact_layers(state), 0
        if is_last or in_block == 0:
            check_faults(state, generator.mesh)
        yield state, np.asarray(sampled.token)


def decode_all(generator, state, max_tokens, *, compact_last=True, texts=None):
    """Returns the new tokens of each row, including an end-of-text token, and the state after them."""
    rows = [[] for _ in range(generator.batch)]
    for new_state, tokens in decode(generator, state, max_tokens, compact_last=compact_last, texts=texts):
        state = new_state
        for row, new in zip(rows, tokens, strict=True):
            row += [int(token) for token in new if token != NO_TOKEN]
    kvjax.raise_faults(state)
    return rows, state


def generate(model, policy, prompts, *, max_new_tokens, seed=0, sampling=GREEDY, **options):
    """Continues prompts with a new `Generator`, whose compiled programs prompts of similar length share."""
    longest = compile_cache.length_bucket(max(map(len, prompts), default=0))[-1]
    generator = Generator(
        model, policy, batch=len(prompts), max_prompt_tokens=longest, max_new_tokens=max_new_tokens, **options
    )
    return decode_all(generator, generator.prefill(generator.init_state(seed, sampling), prompts), max_new_tokens)
