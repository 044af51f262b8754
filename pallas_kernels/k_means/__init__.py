"""One pass of Lloyd's algorithm by cosine: every point's cluster and every cluster's sum, points read once."""

from pallas_kernels.k_means.api import k_means as k_means
from pallas_kernels.k_means.base import Pass as Pass
from pallas_kernels.k_means.mosaic_tpu import Config as Config
from pallas_kernels.k_means.reference import cluster_sums as cluster_sums
