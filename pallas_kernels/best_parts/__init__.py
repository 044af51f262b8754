"""What a query recalls under a budget: the blocks of the best-scored parts of a store."""

from pallas_kernels.best_parts.api import best_parts as best_parts
from pallas_kernels.best_parts.base import Ranked as Ranked
