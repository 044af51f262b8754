"""kvjax: compressed key/value caches for language models, as pure functions over state pytrees."""

from kvjax.attention import Partials as Partials
from kvjax.attention import attend as attend
from kvjax.attention import attend_segment as attend_segment
from kvjax.attention import merge as merge
from kvjax.attention import output as output
from kvjax.policies import REGISTRY as REGISTRY
from kvjax.policies import balancekv as balancekv
from kvjax.policies import balancekv_settings as balancekv_settings
from kvjax.policies import by_head as by_head
from kvjax.policies import by_layer as by_layer
from kvjax.policies import cam as cam
from kvjax.policies import chelsea as chelsea
from kvjax.policies import clustergen as clustergen
from kvjax.policies import clusterkv as clusterkv
from kvjax.policies import exact as exact
from kvjax.policies import factory as factory
from kvjax.policies import h2o as h2o
from kvjax.policies import pyramidkv as pyramidkv
from kvjax.policies import quest as quest
from kvjax.policies import snapkv as snapkv
from kvjax.policies import streaming_llm as streaming_llm
from kvjax.policies import subgen as subgen
from kvjax.policies import subgen_settings as subgen_settings
from kvjax.policies import takes_budget as takes_budget
from kvjax.policies import uniform as uniform
from kvjax.policy import ALL_QUERIES as ALL_QUERIES
from kvjax.policy import CachePolicy as CachePolicy
from kvjax.policy import CacheSpec as CacheSpec
from kvjax.policy import abstract_state as abstract_state
from kvjax.policy import fit_bytes as fit_bytes
from kvjax.policy import row_bytes as row_bytes
from kvjax.policy import row_read_bytes as row_read_bytes
from kvjax.segment import Segment as Segment
from kvjax.segment import segment as segment
from kvjax.segment import segment_bytes as segment_bytes
from kvjax.state import CacheBytes as CacheBytes
from kvjax.state import axes as axes
from kvjax.state import cache_bytes as cache_bytes
from kvjax.state import check as check
from kvjax.state import insert_rows as insert_rows
from kvjax.state import repeat_rows as repeat_rows
from kvjax.state import take_rows as take_rows

__version__ = "0.1.0"
