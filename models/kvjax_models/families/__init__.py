"""The supported model families, one file each: keys of config.json, and names of tensors in both formats.

`family.Family` describes a family. The functions of `formats` read models with these descriptions.
"""

from kvjax_models.families.arcee import ARCEE
from kvjax_models.families.config_values import FULL_ATTENTION as FULL_ATTENTION
from kvjax_models.families.config_values import SLIDING_ATTENTION as SLIDING_ATTENTION
from kvjax_models.families.config_values import ConfigValues as ConfigValues
from kvjax_models.families.dots1 import DOTS1
from kvjax_models.families.ernie4_5 import ERNIE4_5
from kvjax_models.families.exaone4 import EXAONE4
from kvjax_models.families.family import Family as Family
from kvjax_models.families.gemma import GEMMA, GEMMA2, GEMMA3
from kvjax_models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from kvjax_models.families.glm import GLM, GLM4, GLM4_MOE
from kvjax_models.families.gpt_oss import GPT_OSS
from kvjax_models.families.granite import GRANITE
from kvjax_models.families.granite_swa import GRANITE_SWA
from kvjax_models.families.hunyuan import HUNYUAN_V1_DENSE
from kvjax_models.families.lfm2 import LFM2
from kvjax_models.families.llama import LLAMA
from kvjax_models.families.minimax import MINIMAX_M2
from kvjax_models.families.ministral3 import MINISTRAL3
from kvjax_models.families.mistral import MINISTRAL, MISTRAL, MIXTRAL
from kvjax_models.families.olmo import OLMO2, OLMO3
from kvjax_models.families.phi3 import PHI3
from kvjax_models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from kvjax_models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from kvjax_models.families.qwen3_next import QWEN3_NEXT
from kvjax_models.families.seed_oss import SEED_OSS
from kvjax_models.families.smollm3 import SMOLLM3

_FAMILIES = (
    LLAMA, MISTRAL, MINISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GPT_OSS, GEMMA, GEMMA2, GEMMA3, GLM, GLM4, PHI3,
    OLMO2, OLMO3, SMOLLM3, GRANITE, SEED_OSS, MINISTRAL3, EXAONE4, ERNIE4_5, HUNYUAN_V1_DENSE, ARCEE, GRANITE_SWA,
    GEMMA4, GEMMA4_UNIFIED, GLM4_MOE, DOTS1, MINIMAX_M2, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, LFM2,
)  # fmt: skip
FAMILIES = {family.model_type: family for family in _FAMILIES}
