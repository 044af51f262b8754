"""Chunked soft matching's search: the most similar partner of every other key, similarities never written to memory."""

from pallas_kernels.soft_match.api import soft_match as soft_match
from pallas_kernels.soft_match.base import Partners as Partners
from pallas_kernels.soft_match.mosaic_tpu import Config as Config
