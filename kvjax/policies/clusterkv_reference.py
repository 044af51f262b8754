"""ClusterKV as its released code runs it in the study of accuracy."""

import dataclasses
from typing import Literal

from kvjax.policies.clusterkv_paper import ClusterKVPaper


@dataclasses.dataclass(frozen=True)
class ClusterKVReference(ClusterKVPaper):
    """`ClusterKVPaper` with the settings of the released code: 400 clusters for any prompt, k-means++, and later tokens
    are never clustered.

    Source: https://github.com/sjtu-zhao-lab/ClusterKV.
    """

    clusters: int | None = 400
    every: int | None = None
    start: Literal["random", "k-means++"] = "k-means++"
