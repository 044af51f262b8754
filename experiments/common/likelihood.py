"""How likely long texts are when they are read through compressed caches."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from experiments.common import footprint
from experiments.common.settings import possible
from experiments.common.together import prefill_together
from kvjax.registry import PolicyChoice
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import cache_specs
from kvjax_models.model.llama import Llama

OCTAVES = 3  # of positions, beside the first stretch, that a streamed text is cut into


class Stretch(NamedTuple):
    """The tokens of a text from `first` to before `end`, and the texts' means over them: negative log-likelihoods."""

    first: int
    end: int
    losses: Float[np.ndarray, "n"]


class Reading(NamedTuple):
    """What one setting made of all texts."""

    setting: PolicyChoice
    use: footprint.CacheUse
    stretches: list[Stretch]

    def to_json(self) -> dict[str, Any]:
        """All but the setting."""
        stretches = [(stretch.first, stretch.end, stretch.losses.tolist()) for stretch in self.stretches]
        return {"use": self.use, "stretches": stretches}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], setting: PolicyChoice) -> "Reading":
        """The reading that `to_json` gave."""
        stretches = [Stretch(first, end, np.asarray(losses)) for first, end, losses in value["stretches"]]
        return cls(setting, footprint.CacheUse(*value["use"]), stretches)


Refused = dict[PolicyChoice, str]


def accumulating(
    model: Llama, chosen: Sequence[PolicyChoice], texts: Sequence[list[int]], *, batch: int, seed: int
) -> tuple[list[Reading], Refused]:
    """Streams all texts, of one length, through each setting's cache; a multiple of `batch` of them.

    Returns:
        Of each setting that can stream: the stretches are the text's first part and each later octave of positions,
        then all of it. And why the others cannot.
    """
    tokens = len(texts[0])
    ends = [tokens >> octave for octave in range(OCTAVES, -1, -1)]
    # The first token has nothing before it.
    stretches = [*zip([1, *ends], ends, strict=False), (1, tokens)]
    made_for: dict[str, Any] = {"batch": batch, "max_prompt_tokens": tokens, "max_new_tokens": 1, "streaming": True}
    spec = cache_specs(model, **made_for)[0]
    policies, refused = possible(chosen, spec, tokens, streaming=True)
    readings = []
    for setting, policy in tqdm(policies.items(), desc="accumulating", unit="setting", leave=False):
        generator = Generator(model, policy, **made_for, allow_beyond_context=True)
        losses = []
        for begin in range(0, len(texts), batch):
            state, scored = generator.score(generator.init_state(seed + begin), texts[begin : begin + batch])
            losses += [-row for row in scored]
        means = [Stretch(first, end, np.mean([row[first:end] for row in losses], axis=1)) for first, end in stretches]
        readings.append(Reading(setting, footprint.cache_use(generator, state, tokens), means))
    return readings, refused


def at_position(
    model: Llama,
    chosen: Sequence[PolicyChoice],
    texts: Sequence[list[int]],
    position: int,
    *,
    batch: int,
    seed: int,
) -> tuple[list[Reading], Refused]:
    """Reads all texts, of one length, exactly up to a position and the rest through each setting's cache; a multiple of
    `batch` of them.

    Returns:
        Of each setting that can be, one stretch: the tokens behind the position but the first of them, which the exact
        reading predicts. And why the others cannot be.
    """
    tokens = len(texts[0])
    made_for: dict[str, Any] = {"batch": batch, "max_prompt_tokens": position, "max_new_tokens": tokens - position}
    spec = cache_specs(model, **made_for)[0]
    policies, refused = possible(chosen, spec, tokens)
    if not policies:
        return [], refused
    generators = [Generator(model, policy, **made_for, allow_beyond_context=True) for policy in policies.values()]
    losses: list[list[float]] = [[] for _ in policies]
    uses: list[footprint.CacheUse] = []
    for begin in tqdm(range(0, len(texts), batch), desc=f"at {position} tokens", unit="batch", leave=False):
        rows = texts[begin : begin + batch]
        starts = [generator.init_state(seed + begin) for generator in generators]
        states = prefill_together(generators, starts, [text[:position] for text in rows])
        uses = []
        for generator, of_setting in zip(generators, losses, strict=True):
            state, scored = generator.score(states.pop(0), [text[position:] for text in rows])
            of_setting += [-float(np.mean(row[1:])) for row in scored]
            uses.append(footprint.cache_use(generator, state, tokens))
    readings = [
        Reading(setting, use, [Stretch(position + 1, tokens, np.asarray(of_setting))])
        for setting, use, of_setting in zip(policies, uses, losses, strict=True)
    ]
    return readings, refused
