"""Language models whose caches kvjax compresses: the Flax NNX Llama family, Hugging Face directories, generation.

    llm = kvjax_models.load("DIRECTORY")
    print(llm.generate("Once upon a time", policy="subgen", budget="25%"))

Modules: `language_model` (text to text), `generate` (states of a generation), `saved_states`, `checkpoint`,
`tokenizer`, `sampling`, `llama`, `sharding`, `command` (the console command). Knows caches only by their interface.
"""

from kvjax_models.generation.sampling import Sampling as Sampling
from kvjax_models.language_model import LanguageModel as LanguageModel
from kvjax_models.language_model import load as load
