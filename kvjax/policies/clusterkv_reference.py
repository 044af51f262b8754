"""ClusterKV as its released code runs it in the study of accuracy."""

import dataclasses
from typing import Literal

from kvjax.policies.clusterkv import ClusterKV


@dataclasses.dataclass(frozen=True)
class ClusterKVReference(ClusterKV):
    """`ClusterKV` with the settings of the released code: 400 clusters for any prompt, k-means++, at most 20 iterations
    on all keys that turn to the sum of keys, selection per query head, no residual clusters, and later tokens are never
    clustered.

    Source: https://github.com/sjtu-zhao-lab/ClusterKV.
    """

    clusters: int | None = 400
    every: int | None = None
    select: Literal["group", "query_head"] = "query_head"
    residual: bool = False
    iterations: int = 20
    sample: int = 1
    start: Literal["random", "k-means++"] = "k-means++"
    turn_to: Literal["directions", "keys"] = "keys"
