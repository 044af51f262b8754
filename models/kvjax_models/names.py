"""The names of the package `kvjax_models`, which it imports when one is used."""

from kvjax_models.cache import CachedModel as CachedModel
from kvjax_models.citations import Citation as Citation
from kvjax_models.document import Document as Document
from kvjax_models.engine import Completion as Completion
from kvjax_models.engine import Engine as Engine
from kvjax_models.engine import Usage as Usage
from kvjax_models.language_model import LanguageModel as LanguageModel
from kvjax_models.language_model import load as load
from kvjax_models.runner.sampling import Sampling as Sampling
