"""dots.llm1, a Qwen3 with experts as in DeepSeek-V3."""

from kvjax_models.families import deepseek_experts
from kvjax_models.families.family import ATTENTION_BIAS, EXPERTS, Family, Gguf, later_layers

DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    defaults={
        **deepseek_experts.DEFAULTS,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    fields={"attention.query_key_norm": True},
    keys=ATTENTION_BIAS | deepseek_experts.KEYS,
    more_fields=deepseek_experts.expert_fields,
    supported=deepseek_experts.SUPPORTED,
    layer_types=later_layers,
    reads_layer_types=True,
    aliases=deepseek_experts.ALIASES,
    other_keys=deepseek_experts.OTHER_KEYS,
    modules=EXPERTS,
    gguf=Gguf("dots1"),
)
