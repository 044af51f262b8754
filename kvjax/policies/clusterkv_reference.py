"""ClusterKV with the settings of its released accuracy study."""

import dataclasses
from typing import Literal

from kvjax.policies.clusterkv_paper import ClusterKVPaper


@dataclasses.dataclass(frozen=True)
class ClusterKVReference(ClusterKVPaper):
    """`ClusterKVPaper` with the settings of the released code.

    Attributes:
        clusters: 400 clusters for a prompt of any length.
        chunk_tokens: later tokens are never clustered.
        kmeans_init: k-means++.

        Inherited settings: see `ClusterKVPaper`.

    Reference:
        https://github.com/sjtu-zhao-lab/ClusterKV.
    """

    clusters: int | None = 400
    chunk_tokens: int | None = None
    kmeans_init: Literal["random", "k-means++"] = "k-means++"
