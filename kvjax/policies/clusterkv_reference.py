"""ClusterKV as its released code runs it in the study of accuracy."""

import dataclasses
from typing import Literal

from kvjax.policies.clusterkv_paper import ClusterKVPaper


@dataclasses.dataclass(frozen=True)
class ClusterKVReference(ClusterKVPaper):
    """`ClusterKVPaper` with the settings of the released code: 400 clusters for any prompt, k-means++, and later tokens
    are never clustered.

    Reference:
        https://github.com/sjtu-zhao-lab/ClusterKV.
    """

    clusters: int | None = 400
    chunk_tokens: int | None = None
    kmeans_init: Literal["random", "k-means++"] = "k-means++"
