"""kvjax: compressed KV caches for language models, as pure functions over state pytrees.

    cache, counters = kvjax.init(kvjax.SubGenMean(budget=1024), spec, row_keys)
    cache, counters, _ = kvjax.prefill(cache, counters, keys, values, lengths)
    output, cache, counters = kvjax.step(cache, counters, query, key, value)

Other names are in modules. Packages on top of kvjax, such as `kvjax_models`, use these:

- `policy`, `segment`, `spec`, `state` and `quantization` for writing a policy; `methods`, `combinators` and `shared`
  for the policies, their data structures and what several of them use;
- `attention`, `prompt_attention`, `partials` and `rope` for attention, `cache` for the caches of layers;
- `registry`, `budget` and `policy_docs` for policies and budgets from text, `theory` for settings from theorems;
- `distributed` for meshes;
- `messages` for the wording of errors, `lazy_names` for names that are imported at their first use.
"""

from typing import TYPE_CHECKING

from kvjax.lazy_names import lazy_names

if TYPE_CHECKING:
    from kvjax.names import *  # noqa: F403

__version__ = "0.5.0"

__getattr__, __dir__ = lazy_names(__name__)
