"""OLMo 2 and 3, whose norms follow the blocks."""

from kvjax_models.families.family import ATTENTION_BIAS, SANDWICH_NORMS, Family, Gguf, every_nth_full

_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_FIELDS = {"norms.position": "post", "attention.query_key_norm": True, "attention.joint_query_key_norm": True}

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    defaults=_DEFAULTS,
    fields=_FIELDS,
    keys=ATTENTION_BIAS,
    modules=SANDWICH_NORMS,
    gguf=Gguf("olmo2"),
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    defaults=_DEFAULTS | {"sliding_window": 4096},
    fields=_FIELDS,
    keys=ATTENTION_BIAS,
    layer_types=every_nth_full(4),
    scaled_windows=False,  # as in the authors' code; transformers 5.2 scales all layers
    reads_layer_types=True,
    modules=SANDWICH_NORMS,
    gguf=Gguf("olmo2", marker="attention.sliding_window"),
)
