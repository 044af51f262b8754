"""The fused cluster-attention hot loop: query scores, log-weights and both sums in one pass over weighted entries."""

from pallas_kernels.weighted_decode.api import weighted_decode as weighted_decode
from pallas_kernels.weighted_decode.api import weighted_decode_parts as weighted_decode_parts
from pallas_kernels.weighted_decode.base import EMPTY as EMPTY
from pallas_kernels.weighted_decode.base import Entries as Entries
from pallas_kernels.weighted_decode.base import Partials as Partials
from pallas_kernels.weighted_decode.mosaic_gpu import GpuConfig as GpuConfig
from pallas_kernels.weighted_decode.mosaic_tpu import Config as Config
from pallas_kernels.weighted_decode.reference import MANY_ROWS as MANY_ROWS
from pallas_kernels.weighted_decode.reference import SLOT_BLOCK as SLOT_BLOCK
