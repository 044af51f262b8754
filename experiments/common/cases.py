"""What experiments on streams run on: synthetic streams at every norm, and the recorded one in every layer."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import kvjax
from experiments.common import settings, streams
from experiments.common.options import Run, each

RECORDED = "recorded"
STREAMS = (*streams.SYNTHETIC, RECORDED)


@dataclasses.dataclass(frozen=True)
class Streams(Run):
    """Options of an experiment on streams."""

    stream: tuple[str, ...] = each(*STREAMS, choices=STREAMS)  # streams; repeatable
    seeds: int = 4  # seeds, from --seed on
    norm: tuple[float, ...] = each(8.0)  # l2 norms of synthetic keys and queries; repeatable
    tokens: int = 8192  # tokens of a synthetic stream
    head_dim: int = 128  # dimensions of a synthetic stream
    recorded_tokens: int = 4032  # tokens of a recorded stream
    queries: int = 64  # queries per seed: consecutive steps of a recorded stream

    QUICK: ClassVar[dict[str, Any]] = {"seeds": 2, "tokens": 1024, "recorded_tokens": 512}

    def model_of(self, stream: str) -> str:
        """The model that rows of a stream name."""
        return self.model if stream == RECORDED else "synthetic"


class Case(NamedTuple):
    """A stream at a norm, or in a layer, one row of the batch a seed."""

    stream: str
    where: str  # "norm" or "layer"
    number: float
    layers: int
    drawn: streams.Streams

    def __str__(self) -> str:
        return f"{self.stream}, {self.where} {self.number:g}"

    @property
    def layer(self) -> int | None:
        """Of a recorded stream."""
        return int(self.number) if self.where == "layer" else None


def cases(options: Streams, norms: Sequence[float] = (), *, prompt_queries: bool = False) -> Iterator[Case]:
    """The streams that options ask for.

    Args:
        norms: those of synthetic streams, where not the options'.
        prompt_queries: whether the prompt's own queries are wanted, too.
    """
    seeds = options.seeds_of(options.seeds)
    for name in options.stream:
        if name == RECORDED:
            model, tokenizer = settings.load_model(options)
            sizes = (options.recorded_tokens, options.queries)
            for layer, drawn in streams.recorded(model, tokenizer, seeds, *sizes, prompt_queries=prompt_queries):
                yield Case(name, "layer", layer, model.config.layers, drawn)
        else:
            sizes = (options.tokens, options.queries)
            drawn = streams.synthetic(name, seeds, *sizes, options.head_dim, prompt_queries=prompt_queries)
            for norm in norms or options.norm:
                yield Case(name, "norm", norm, 1, drawn.scaled(norm))


def spec_of(drawn: streams.Streams, layer: int = 0, layers: int = 1) -> kvjax.CacheSpec:
    """The spec of a cache that takes a stream."""
    batch, tokens, kv_heads, head_dim = drawn.keys.shape
    sizes = {"batch": batch, "query_heads": drawn.queries.shape[2], "kv_heads": kv_heads, "head_dim": head_dim}
    return kvjax.CacheSpec(**sizes, max_prompt_tokens=tokens, max_new_tokens=1, layer=layer, layers=layers)
