"""kvjax: compressed KV caches for language models, as pure functions over state pytrees.

    cache = kvjax.init(kvjax.SubGenMean(budget=1024), spec, row_keys)
    cache, _ = kvjax.prefill(cache, keys, values, lengths)
    output, cache = kvjax.step(cache, query, key, value)

Other names are in modules: `kvjax.policy` and `kvjax.segment` for writing a policy, `kvjax.methods` for the policies
and their data structures, `kvjax.shared` for what several methods use, `kvjax.theory` for settings from theorems,
`kvjax.registry` and `kvjax.budget` for policies from text, `kvjax.distributed` for meshes.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.names import *  # noqa: F403

__version__ = "0.4.0"


def __getattr__(name: str) -> Any:
    """Imports a module, or all names: they import JAX, without which the command line starts sooner."""
    if name != "__all__" and name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    names = vars(importlib.import_module(f"{__name__}.names"))
    public = {name: value for name, value in names.items() if not name.startswith("_")}
    globals().update(public, __all__=list(public))
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module(f"{__name__}.names").__dict__})
