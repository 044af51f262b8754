"""ClusterKV (Liu et al. 2024): all tokens are kept in semantic clusters, and queries read the nearest clusters.

All tokens stay in the cache; a step reads few of them. Per KV head:

1. After the prompt has been read exactly, k-means groups its keys by cosine similarity. Sinks are left out.
2. Tokens are stored cluster by cluster, in blocks, so that a cluster is a run of blocks. The index of a cluster is its
   mean key, its size and its first block.
3. While decoding, new tokens wait in a window and are always read. When `chunk_tokens` of them have come together, they
   are clustered among themselves and appended as `chunk_clusters` further clusters. Older clusters never change.

At every step, per query head:

4. The score of a cluster is the product of the query and its mean key.
5. Clusters are selected in descending order of score until their sizes reach the budget B. The last one is cut.
6. Attention reads the sinks, the window and the selected blocks in place (`pallas_kernels.cluster_recall`).

`ClusterPolicy` has steps 1 to 3 and the selection of blocks; this file has the paper's settings and score.
`ClusterKVResidual` is kvjax's variant, which also reads the means of clusters that are not selected.
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.methods.clusterkv.cluster_policy import ClusterPolicy
from kvjax.methods.exact.exact import Exact
from kvjax.policy import Policy, check_min
from kvjax.segment import BlockSelection
from kvjax.shared.clusters import Clusters, cluster_logits, select_head_blocks
from kvjax.spec import CacheSpec


@dataclasses.dataclass(frozen=True)
class ClusterKV(ClusterPolicy):
    """Keeps every token in clusters of similar keys; every query head reads the clusters with the highest scores.

    A cluster's score is <query, mean key>. A query also reads the sinks and the tokens that are not clustered yet. The
    last cluster that fits the budget is read in part. The prompt is clustered by cosine k-means after it has been read,
    and later tokens in chunks. Where the paper and its released code differ, both are settings (`clusters`,
    `kmeans_init`, `chunk_tokens` and `chunk_clusters`).

    Attributes:
        budget: tokens that a query head reads (B), sinks included as in the released accuracy study, tokens that are
            not clustered yet excluded. The bytes that a step reads are more: the query heads of a KV head read
            separately, and the mean keys count.
        sinks: first tokens, which are always read and never clustered (16; section III).
        recent: newest tokens that are always read (kvjax's addition; the paper reads those that are not clustered yet).
        clusters: number of clusters of a prompt (C_0): L / 80 in the paper, 400 in the released accuracy study, 200 in
            its speed study. None for max(L / 80, min(400, L / 8)): the paper's number from 32,000 tokens on, the
            accuracy study's from 3,200 tokens on, and clusters of 8 tokens for shorter prompts (kvjax's rule).
        chunk_tokens: later tokens that are clustered together (m = 320; section III). None: later tokens are never
            clustered and always read, as in the released accuracy study.
        chunk_clusters: clusters per chunk (C_+ = 4; section III; 8 in the released speed study).
        kmeans_init: first centroids: "k-means++" as in the released accuracy study, or "random" keys as in its speed
            study.
        iterations: maximum number of iterations of k-means (20 in the released code; the paper iterates to
            convergence).
        full_layers: first layers that are not compressed (2; section V), in models with more layers than that.
        block_size: tokens per block of the store. 1 reads the paper's tokens. Kernels read multiples of 16 without
            copies; a cluster's last block may then be partly empty, and a query reads at most as many blocks as
            clusters of average size need. None (kvjax's rule): 16 if the clusters of a prompt have 64 tokens or more on
            average (from 25,600 tokens on), otherwise 1. With clusters of 80 tokens, blocks of 16 hold 1.2 times the
            bytes, and a budget in bytes reads a sixth to a fifth fewer tokens.
        compact_every: tokens between compactions; at most `chunk_tokens` (kvjax's staging).

    Reference:
        ClusterKV, sections III to V; https://github.com/sjtu-zhao-lab/ClusterKV.
    """

    clusters: int | None = None
    kmeans_init: Literal["random", "k-means++"] = "k-means++"
    iterations: int = 20
    full_layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, clusters=self.clusters, iterations=self.iterations)
        check_min(0, full_layers=self.full_layers)

    def for_layer(self, spec: CacheSpec) -> Policy:
        """Returns `Exact` in the first layers, otherwise this policy with the size of its blocks."""
        return Exact(self.compact_every) if spec.layer < self.full_layers < spec.layers else super().for_layer(spec)

    def num_clusters(self, tokens: Any) -> Any:
        """Returns the number of clusters of a prompt of `tokens` tokens, an int or an array."""
        numpy: Any = np if isinstance(tokens, int) else jnp
        if self.clusters is not None:
            return numpy.minimum(tokens, self.clusters)
        return numpy.maximum(-(-tokens // 80), numpy.minimum(400, -(-tokens // 8)))

    def k_means_options(self, is_prompt: bool) -> dict[str, Any]:
        """Returns the settings of the released code: cosine similarity, and means of keys as centroids."""
        return {"iterations": self.iterations, "kmeans_init": self.kmeans_init, "centroid_update": "keys"}

    def select(self, clusters: Clusters, query: Float[Array, "B 1 H_q D"], **limits: int) -> BlockSelection:
        """Selects clusters by descending <query, mean key>, for every query head."""
        scores = cluster_logits(clusters, query)
        return BlockSelection(*select_head_blocks(scores, clusters.size, clusters.first_block, **limits)[:2])
