"""ClusterKV as its paper describes it (Liu et al. 2024)."""

import dataclasses
from typing import Literal

from kvjax.policies.clusterkv import ClusterKV


@dataclasses.dataclass(frozen=True)
class ClusterKVPaper(ClusterKV):
    """`ClusterKV` with the paper's settings: every query head reads clusters of its own, by their mean keys and token
    by token, clusters that are not read are absent, and k-means looks at all keys, which it turns to the mean of keys
    as they are (at most 20 times, as in the released code; the paper goes on until nothing changes). The paper keeps
    the first two layers whole: `FirstLayers(2, ...)`, `full_layers=2` in text.

    Reference:
        ClusterKV, sections 3 and 4.
    """

    select: Literal["group", "query_head"] = "query_head"
    residual: bool = False
    iterations: int = 20
    sample: int = 1
    centroid_update: Literal["directions", "keys"] = "keys"
    score_stddevs: float = 0.0
    block_size: int = 1
