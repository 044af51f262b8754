"""ClusterKVResidual: kvjax's variant of `ClusterKV`, which approximates the clusters that are not read."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from kvjax.methods.clusterkv.cluster_policy import ClusterPolicy
from kvjax.policy import check_min
from kvjax.segment import BlockSelection
from kvjax.shared.clusters import Clusters, cluster_logits, group_score, residual_clusters, select_head_blocks


@dataclasses.dataclass(frozen=True)
class ClusterKVResidual(ClusterPolicy):
    """Keeps every token in clusters of similar keys; a group of query heads reads the clusters with the highest scores.

    It differs from `ClusterKV` in four points, all of them kvjax's. A cluster that is not read is present as one entry:
    its mean key and mean value, weighted by the tokens that are not read. The query heads of a KV head read the same
    clusters, those with the most attention per token, so that a budget reads fewer bytes by the group size. A score
    includes standard deviations of the cluster's keys. And k-means averages directions of keys, mostly on a sample.

    Attributes:
        budget: tokens that a KV head reads, sinks and recent tokens included, tokens that are not clustered yet
            excluded. The number of blocks is limited to the number that clusters of average size need.
        sinks: first tokens, which are always read and never clustered (16; ClusterKV, section III).
        recent: newest tokens that are always read (kvjax's addition).
        cluster_tokens: average tokens per cluster of a prompt (80; ClusterKV, section III).
        chunk_tokens: later tokens that are clustered together (320; ClusterKV, section III). None: later tokens are
            never clustered and always read.
        chunk_clusters: clusters per chunk (4; ClusterKV, section III).
        score_stddevs: standard deviations of a cluster's keys along the query, assumed isotropic (|q| rms / sqrt(D)),
            that are added to its score (kvjax's choice).
        iterations: iterations of k-means (kvjax's choice).
        sample: all iterations for a prompt except the last two use every `sample`-th key (kvjax's choice).
        block_size: tokens per block of the store (kvjax's choice). A cluster's last block may be partly empty. Kernels
            read multiples of 16 without copies.
        compact_every: tokens between compactions; at most `chunk_tokens` (kvjax's staging).
    """

    cluster_tokens: int = 80
    score_stddevs: float = 2.0
    iterations: int = 10
    sample: int = 4
    block_size: int = 16

    has_residual = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, cluster_tokens=self.cluster_tokens, iterations=self.iterations, sample=self.sample)
        check_min(0, score_stddevs=self.score_stddevs)

    def num_clusters(self, tokens: Any) -> Any:
        """Returns the number of clusters of a prompt of `tokens` tokens, an int or an array."""
        return -(-tokens // self.cluster_tokens)

    def k_means_options(self, is_prompt: bool) -> dict[str, Any]:
        """Returns the settings of k-means over directions of keys; only a prompt is sampled."""
        sample = self.sample if is_prompt else 1
        return {"iterations": self.iterations, "sample": sample, "polish": min(2, self.iterations)}

    def select(self, clusters: Clusters, query: Float[Array, "B 1 H_q D"], **limits: int) -> BlockSelection:
        """Selects clusters by descending attention per token, for every group of query heads."""
        scores = group_score(cluster_logits(clusters, query, self.score_stddevs), clusters.size)[:, :, None]
        selected = select_head_blocks(scores, clusters.size, clusters.first_block, **limits)
        return BlockSelection(*selected[:2], residual_clusters(clusters, selected[2]))
