"""ClusterKV with the settings of its paper (Liu et al. 2024)."""

import dataclasses
from typing import Literal

from kvjax.policies.clusterkv import ClusterKV


@dataclasses.dataclass(frozen=True)
class ClusterKVPaper(ClusterKV):
    """`ClusterKV` with the paper's settings.

    Every query head reads clusters by their mean keys, token by token. Clusters that are not read are absent. k-means
    uses all keys and runs for 20 iterations, as in the released code; the paper runs until convergence. The paper does
    not compress the first two layers: use `FirstLayers(2, ...)`, or `full_layers=2` in a string.

    Attributes:
        select: every query head selects.
        residual: clusters that are not read are absent.
        iterations: iterations of k-means.
        sample: k-means uses all keys.
        centroid_update: centroids are means of keys.
        score_stddevs: scores use mean keys only.
        block_size: one token per block.

        Inherited settings: see `ClusterKV`.

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
