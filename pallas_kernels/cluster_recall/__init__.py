"""Attention to recalled blocks: the first tokens of blocks that are named, of a store that stays where it is."""

from pallas_kernels.cluster_recall.api import cluster_recall as cluster_recall
from pallas_kernels.cluster_recall.base import Blocks as Blocks
from pallas_kernels.cluster_recall.base import entry_width as entry_width
from pallas_kernels.cluster_recall.mosaic_gpu import GpuConfig as GpuConfig
from pallas_kernels.cluster_recall.mosaic_tpu import Config as Config
from pallas_kernels.cluster_recall.reference import as_entries as as_entries
from pallas_kernels.cluster_recall.reference import halves as halves
from pallas_kernels.cluster_recall.reference import taken as taken
