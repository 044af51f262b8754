"""Language models with compressed KV caches: a Flax NNX decoder family, checkpoints and text generation.

    llm = kvjax_models.load("DIRECTORY")
    print(llm.generate("Once upon a time", policy="auto", budget="25%"))
    document = llm.cache("auto", "25%").read(text)
    print(document.ask("What happened to the ship?"))

Subpackages: `families` describes the supported models, `formats` reads their checkpoints and tokenizers, `model` is the
decoder, `generation` runs it through KV caches, `server` is `kvjax serve`, `cli` is the console command `kvjax`, and
`adapters` has caches for models of other libraries.
"""

from typing import TYPE_CHECKING

from kvjax.lazy_names import lazy_names

if TYPE_CHECKING:
    from kvjax_models.names import *  # noqa: F403

__getattr__, __dir__ = lazy_names(__name__)
