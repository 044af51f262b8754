"""Continuous batching of requests; `CachedModel.engine` makes an `Engine`."""

from kvjax_models.engine.engine import Engine as Engine
from kvjax_models.engine.engine import seed_of_prompt as seed_of_prompt
from kvjax_models.engine.outputs import Collector as Collector
from kvjax_models.engine.outputs import Completion as Completion
from kvjax_models.engine.outputs import FinishReason as FinishReason
from kvjax_models.engine.outputs import Output as Output
from kvjax_models.engine.outputs import TokenLogprobs as TokenLogprobs
from kvjax_models.engine.outputs import Usage as Usage
