"""The names of the package `kvjax`, which it imports when one is used."""

from kvjax import theory as theory
from kvjax.budget import fit_bytes as fit_bytes
from kvjax.cache import Cache as Cache
from kvjax.cache import append as append
from kvjax.cache import attend as attend
from kvjax.cache import compact as compact
from kvjax.cache import init as init
from kvjax.cache import prefill as prefill
from kvjax.cache import read_bytes as read_bytes
from kvjax.cache import step as step
from kvjax.combinators.ada_kv import AdaKV as AdaKV
from kvjax.combinators.by_head import ByHead as ByHead
from kvjax.combinators.by_layer import ByLayer as ByLayer
from kvjax.combinators.by_layer import FirstLayers as FirstLayers
from kvjax.combinators.head_budgets import HeadBudgets as HeadBudgets
from kvjax.combinators.host_memory import HostMemory as HostMemory
from kvjax.distributed.sharding import make_mesh as make_mesh
from kvjax.frozen_cache import FrozenCache as FrozenCache
from kvjax.frozen_cache import freeze as freeze
from kvjax.methods.table import *  # noqa: F403
from kvjax.methods.top_k.top_k_policy import TopKPolicy as TopKPolicy
from kvjax.partials import normalize as normalize
from kvjax.policy import Requirements as Requirements
from kvjax.policy import describe as describe
from kvjax.policy import prompt_queries as prompt_queries
from kvjax.quantization import QuantizedArray as QuantizedArray
from kvjax.registry import PolicyChoice as PolicyChoice
from kvjax.registry import register as register
from kvjax.sliding_window import SlidingWindow as SlidingWindow
from kvjax.spec import CacheSpec as CacheSpec
from kvjax.staging import Counters as Counters
from kvjax.state import cache_bytes as cache_bytes
from kvjax.state import insert_rows as insert_rows
from kvjax.state import raise_faults as raise_faults
from kvjax.state import repeat_rows as repeat_rows
from kvjax.state import take_rows as take_rows
