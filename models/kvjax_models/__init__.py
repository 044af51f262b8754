"""Language models with compressed KV caches: a Flax NNX decoder family, checkpoints and text generation.

    llm = kvjax_models.load("DIRECTORY")
    print(llm.generate("Once upon a time", policy="auto", budget="25%"))
    document = llm.cache("auto", "25%").read(text)
    print(document.ask("What happened to the ship?"))

Subpackages: `formats` reads checkpoints and tokenizers, `model` is the decoder, `generation` runs it through
KV caches, `cli` is the console command `kvjax`. Caches are used through the interface of `kvjax` only.
"""

from kvjax_models.cache import CachedModel as CachedModel
from kvjax_models.document import Document as Document
from kvjax_models.engine import Engine as Engine
from kvjax_models.generation.sampling import Sampling as Sampling
from kvjax_models.language_model import LanguageModel as LanguageModel
from kvjax_models.language_model import load as load
from kvjax_models.usage import Completion as Completion
from kvjax_models.usage import Usage as Usage
