"""Halving a block of entries by the self-balancing walk: the kernel matrix and the loop of decisions on chip."""

from pallas_kernels.balanced_walk.api import pairs as pairs
from pallas_kernels.balanced_walk.api import signs as signs
from pallas_kernels.balanced_walk.base import Block as Block
from pallas_kernels.balanced_walk.base import Pairs as Pairs
from pallas_kernels.balanced_walk.base import Signs as Signs
from pallas_kernels.balanced_walk.mosaic_tpu import Config as Config
from pallas_kernels.balanced_walk.reference import diagonal as diagonal
from pallas_kernels.balanced_walk.reference import matrix as matrix
from pallas_kernels.balanced_walk.reference import signs_by_matrix as signs_by_matrix
