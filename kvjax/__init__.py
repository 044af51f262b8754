"""kvjax: compressed KV caches for language models, as pure functions over state pytrees.

    cache, counters = kvjax.init(kvjax.SubGenMean(budget=1024), spec, row_keys)
    cache, counters, _ = kvjax.prefill(cache, counters, keys, values, lengths)
    output, cache, counters = kvjax.step(cache, counters, query, key, value)

Other names are in modules: `kvjax.policy` and `kvjax.segment` for writing a policy, `kvjax.methods` for the policies
and their data structures, `kvjax.shared` for what several methods use, `kvjax.theory` for settings from theorems,
`kvjax.registry` and `kvjax.budget` for policies from text, `kvjax.distributed` for meshes.
"""

from typing import TYPE_CHECKING

from kvjax.lazy_names import lazy_names

if TYPE_CHECKING:
    from kvjax.names import *  # noqa: F403

__version__ = "0.4.0"

__getattr__, __dir__ = lazy_names(__name__)
