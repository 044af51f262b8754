"""Experts as in DeepSeek-V3: sigmoid routing, groups, a shared expert, and first layers without experts."""

from typing import Any

from kvjax_models.families.config_values import ConfigValues

DEFAULTS: dict[str, Any] = {
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
KEYS: dict[str, str | tuple[str, ...]] = {
    "n_routed_experts": "experts.number",
    "num_experts_per_tok": "experts.per_token",
    "moe_intermediate_size": "experts.width",
    "norm_topk_prob": "experts.normalize_weights",
    "n_group": "experts.groups",
    "topk_group": "experts.groups_per_token",
    "routed_scaling_factor": "experts.scaling_factor",
}
ALIASES = {"num_local_experts": "n_routed_experts"}  # transformers' other name
# "noaux_tc" names the selection by sigmoid scores with a bias.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid", "noaux_tc"),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
OTHER_KEYS = ("n_shared_experts", "first_k_dense_replace")


def expert_fields(values: ConfigValues) -> dict[str, Any]:
    """Returns the fields of the router, the shared expert and the dense layers.

    Raises:
        ValueError: if a size is invalid.
    """
    shared = values.integer("n_shared_experts", minimum=0)
    dense = min(values.integer("first_k_dense_replace", minimum=0), values.integer("num_hidden_layers"))
    return {
        "experts.scoring_func": "sigmoid",
        "experts.shared_width": shared * values.integer("moe_intermediate_size"),
        "experts.dense_layers": tuple(range(dense)),
    }
