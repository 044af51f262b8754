"""The policies, one file per system, and the registry that command lines read."""

import inspect
from collections.abc import Callable

from kvjax.policies.balancekv import balancekv as balancekv
from kvjax.policies.balancekv import balancekv_settings as balancekv_settings
from kvjax.policies.cam import cam as cam
from kvjax.policies.chelsea import chelsea as chelsea
from kvjax.policies.choice import by_head as by_head
from kvjax.policies.choice import by_layer as by_layer
from kvjax.policies.choice import chosen as chosen
from kvjax.policies.choice import first_layers as first_layers
from kvjax.policies.clustergen import clustergen as clustergen
from kvjax.policies.clusterkv import clusterkv as clusterkv
from kvjax.policies.clusterkv import missing_mass as missing_mass
from kvjax.policies.exact import exact as exact
from kvjax.policies.h2o import h2o as h2o
from kvjax.policies.host_memory import host_memory as host_memory
from kvjax.policies.infinigen import infinigen as infinigen
from kvjax.policies.pyramidkv import pyramidkv as pyramidkv
from kvjax.policies.quantized import quantized as quantized
from kvjax.policies.quest import quest as quest
from kvjax.policies.snapkv import snapkv as snapkv
from kvjax.policies.streaming_llm import streaming_llm as streaming_llm
from kvjax.policies.subgen import subgen as subgen
from kvjax.policies.subgen import subgen_settings as subgen_settings
from kvjax.policies.uniform import uniform as uniform
from kvjax.policy import CachePolicy

REGISTRY: dict[str, Callable[..., CachePolicy]] = {
    "exact": exact,
    "streaming_llm": streaming_llm,
    "uniform": uniform,
    "balancekv": balancekv,
    "cam": cam,
    "chelsea": chelsea,
    "clustergen": clustergen,
    "clusterkv": clusterkv,
    "h2o": h2o,
    "infinigen": infinigen,
    "pyramidkv": pyramidkv,
    "quest": quest,
    "snapkv": snapkv,
    "subgen": subgen,
}


def factory(name: str) -> Callable[..., CachePolicy]:
    """The factory of a policy by its registered name.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    if name not in REGISTRY:
        raise ValueError(f"policy {name!r} is not known; known: {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name]


def takes_budget(name: str) -> bool:
    """Whether the policy is sized by a budget (all but exact are)."""
    return "budget" in inspect.signature(factory(name)).parameters
