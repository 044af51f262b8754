"""Language models with compressed KV caches: a Flax NNX decoder family, checkpoints and text generation.

    llm = kvjax_models.load("DIRECTORY")
    print(llm.generate("Once upon a time", policy="auto", budget="25%"))
    document = llm.cache("auto", "25%").read(text)
    print(document.ask("What happened to the ship?"))

Subpackages: `formats` reads checkpoints and tokenizers, `model` is the decoder, `generation` runs it through
KV caches, `cli` is the console command `kvjax`. Caches are used through the interface of `kvjax` only.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax_models.names import *  # noqa: F403


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
