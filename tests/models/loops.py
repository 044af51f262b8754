"""Plain loops over the steps of a `Generator`, as references for the engine."""

import numpy as np

import kvjax
from kvjax_models import compile_cache
from kvjax_models.runner.decode import NO_TOKEN, Group, decode_groups
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import GREEDY
from kvjax_models.runner.state import check_faults, check_finite, commit_to_device, compact_layers


def decode(generator, state, max_tokens):
    """Yields the state and the new tokens [B, n] after every block."""
    generator.check_capacity(np.asarray(state.positions), np.where(np.asarray(state.done), 0, max_tokens))
    state, total = commit_to_device(state, generator.mesh), 0
    while total < max_tokens and not np.asarray(state.done).all():
        steps = min(generator.block_size, max_tokens - total)
        group = Group(generator.split_model, state)
        [state], [sampled] = decode_groups([group], generator.eos, generator.block_size, steps)
        check_finite(state)
        state, total = compact_layers(state), total + steps
        check_faults(state, generator.mesh)
        yield state, np.asarray(sampled.token)


def decode_all(generator, state, max_tokens):
    """Returns the new tokens of each row, including an end-of-text token, and the state after them."""
    rows = [[] for _ in range(generator.batch)]
    for new_state, tokens in decode(generator, state, max_tokens):
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


def gather(outputs):
    """Returns tokens, texts and finish reasons by request of an engine."""
    rows, texts, reasons = {}, {}, {}
    for output in outputs:
        assert output.number not in reasons
        rows.setdefault(output.number, []).extend(output.tokens)
        texts[output.number] = texts.get(output.number, "") + output.text
        if output.finish_reason is not None:
            reasons[output.number] = output.finish_reason
    return rows, texts, reasons
