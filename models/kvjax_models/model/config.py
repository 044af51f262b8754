"""The configuration of a decoder."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from kvjax_models.model.activations import ACTIVATIONS
from kvjax_models.model.recurrent import RecurrentSizes
from kvjax_models.model.rotary import RopeScaling, Rotary, make_rotary

NORM_POSITIONS = ("pre", "post", "sandwich")
SCORING_FUNCS = ("softmax", "sigmoid")


def _check_choice(name: str, value: str, allowed: typing.Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Features of attention; heads and their dimension are sizes of `LlamaConfig`.

    Attributes:
        qkv_bias: whether query, key and value projections have a bias.
        output_bias: whether the output projection has a bias.
        query_key_norm: whether queries and keys are normalized before the rotary embedding.
        joint_query_key_norm: whether this norm spans all heads of a token instead of each head.
        query_key_norm_after_rope: whether this norm follows the rotary embedding.
        value_norm: whether values are normalized, without a scale.
        keys_as_values: whether layers without a window have one projection for keys and values. Norms and the rotary
            embedding make them differ afterwards, so caches store both.
        scale: scale of logits; None: 1 / sqrt(head_dim).
        logit_cap: cap c of logits, l -> c tanh(l / c); None: no cap.
        sinks: whether every query head has an attention sink logit.
        gate: whether the output is multiplied by the sigmoid of a projection of the input.
        windows: sliding window of every layer in tokens, None for full attention; (): full attention in all layers.
        window_kv_heads: number of KV heads in layers with a window; None: as in other layers.
        window_head_dim: dimension of a head in layers with a window; None: as in other layers.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    query_key_norm: bool = False
    joint_query_key_norm: bool = False
    query_key_norm_after_rope: bool = False
    value_norm: bool = False
    keys_as_values: bool = False
    scale: float | None = None
    logit_cap: float | None = None
    sinks: bool = False
    gate: bool = False
    windows: tuple[int | None, ...] = ()
    window_kv_heads: int | None = None
    window_head_dim: int | None = None


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding.

    Attributes:
        theta: base.
        layer_theta: base of every layer; (): `theta`.
        window_theta: base in layers with a window, which is then not scaled there; None: as in other layers.
        scaling: scaling of the frequencies; None: not scaled.
        rotary_dim: number of rotated dimensions of a head; None: all.
        nope_layers: layers without rotary embedding.
        query_growth: growth of queries with their position; see `rotary.Rotary`.
        query_period: positions with the same growth.
    """

    theta: float = 10000.0
    layer_theta: tuple[float, ...] = ()
    window_theta: float | None = None
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    nope_layers: tuple[int, ...] = ()
    query_growth: float = 0.0
    query_period: int = 1


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """RMSNorm of the residual stream, queries and keys.

    Attributes:
        position: position of a block's norms: "pre" before it, "post" after it and before the residual connection,
            "sandwich" both.
        epsilon: epsilon of every norm.
        offset: added to the stored scale of every norm.
    """

    position: str = "pre"
    epsilon: float = 1e-5
    offset: float = 0.0

    def __post_init__(self) -> None:
        """Checks the position.

        Raises:
            ValueError: if it is not supported.
        """
        _check_choice("norms.position", self.position, NORM_POSITIONS)


@dataclasses.dataclass(frozen=True)
class ScaleConfig:
    """Scales of activations.

    Attributes:
        embedding: scale of embeddings, rounded to the model's dtype.
        residual: scale of the output of every block.
        layer: whether the output of every layer is multiplied by a parameter.
        logit_divisor: divisor of next-token logits.
        logit_cap: cap of next-token logits; None: no cap.
    """

    embedding: float = 1.0
    residual: float = 1.0
    layer: bool = False
    logit_divisor: float = 1.0
    logit_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts in place of MLPs.

    Attributes:
        number: number of experts per layer.
        per_token: number of experts that process a token.
        width: hidden size of an expert.
        normalize_weights: whether the weights of a token's experts sum to 1.
        scaling_factor: factor of the weights of selected experts.
        scoring_func: "softmax" or "sigmoid" of the router's logits; see `experts.Router`.
        groups: number of groups of experts; at least two experts each.
        groups_per_token: number of groups from which the experts of a token are selected.
        shared_width: hidden size of the expert that processes all tokens; 0: none.
        shared_gate: whether a gate scales the output of the shared expert.
        dense_layers: layers that have a single MLP.
        parallel: whether every layer has an MLP and experts in parallel; see `llama.ParallelExperts`.
    """

    number: int
    per_token: int
    width: int
    normalize_weights: bool = True
    scaling_factor: float = 1.0
    scoring_func: str = "softmax"
    groups: int = 1
    groups_per_token: int = 1
    shared_width: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    parallel: bool = False

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: if fields are invalid or inconsistent.
        """
        number, per_token, groups, selected = self.number, self.per_token, self.groups, self.groups_per_token
        _check_choice("experts.scoring_func", self.scoring_func, SCORING_FUNCS)
        if not 1 <= per_token <= number:
            raise ValueError(f"experts.per_token={per_token} must be between 1 and experts.number={number}")
        if self.width < 1:
            raise ValueError(f"experts.width={self.width} must be at least 1")
        if groups == 1:
            return
        if self.scoring_func != "sigmoid":
            raise ValueError(f"experts.groups={groups} needs scoring_func='sigmoid'")
        if groups < 1 or number % groups or number < 2 * groups:
            raise ValueError(
                f"experts.groups={groups} must divide experts.number={number} into groups of at least two experts"
            )
        if not 1 <= selected <= groups or per_token > selected * number // groups:
            raise ValueError(
                f"experts.groups_per_token={selected} must be between 1 and experts.groups={groups}, and these groups "
                f"must have at least experts.per_token={per_token} experts"
            )


@dataclasses.dataclass(frozen=True)
class RecurrenceConfig:
    """Layers with a recurrence in place of attention (`model.recurrent`).

    Attributes:
        layers: numbers of these layers.
        sizes: their sizes, which determine the kind of recurrence.
    """

    layers: tuple[int, ...]
    sizes: RecurrentSizes

    def __post_init__(self) -> None:
        """Checks that there are such layers.

        Raises:
            ValueError: if there are none.
        """
        if not self.layers:
            raise ValueError("recurrence.layers is empty; pass recurrence=None")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a decoder and the features in which model families differ.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        width: size of the residual stream.
        mlp_width: hidden size of the MLPs.
        layers: number of layers.
        query_heads: number of query heads.
        kv_heads: number of KV heads.
        head_dim: dimension of a head.
        max_length: context length that the model was trained for, in tokens.
        activation: activation of MLPs, one of `activations.ACTIVATIONS`.
        mlp_bias: whether MLPs, routers and experts have biases.
        tied_embeddings: whether the embedding is also the output head.
        attention: biases, norms, scale and windows of attention.
        rope: the rotary embedding.
        norms: position, epsilon and offset of norms.
        scales: scales of embeddings, residual connections and next-token logits.
        experts: the mixture of experts; None: a single MLP per layer.
        recurrence: layers without attention; None: all layers have attention.
    """

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    activation: str = "silu"
    mlp_bias: bool = False
    tied_embeddings: bool = False
    attention: AttentionConfig = AttentionConfig()
    rope: RopeConfig = RopeConfig()
    norms: NormConfig = NormConfig()
    scales: ScaleConfig = ScaleConfig()
    experts: ExpertConfig | None = None
    recurrence: RecurrenceConfig | None = None

    def __post_init__(self) -> None:
        """Checks the sizes, and groups of features against them.

        Raises:
            ValueError: if fields are invalid or inconsistent.
        """
        attention, rope = self.attention, self.rope
        _check_choice("activation", self.activation, ACTIVATIONS)
        heads = {"kv_heads": self.kv_heads, "attention.window_kv_heads": attention.window_kv_heads or 1}
        for name, number in heads.items():
            if self.query_heads % number:
                raise ValueError(f"query_heads={self.query_heads} must be a multiple of {name}={number}")
        dims = {"head_dim": self.head_dim, "attention.window_head_dim": attention.window_head_dim or 0}
        for name, dim in dims.items():
            if dim % 2:
                raise ValueError(f"{name}={dim} must be even: rotary embedding rotates pairs of dimensions")
        if attention.windows and len(attention.windows) != self.layers:
            raise ValueError(
                f"attention.windows must have one entry per layer ({self.layers}), got {len(attention.windows)}"
            )
        if not self.attention_layers:
            raise ValueError("recurrence.layers names every layer; at least one must have attention")
        if attention.query_key_norm_after_rope and (attention.scale is not None or rope.query_growth):
            raise ValueError(
                "attention.query_key_norm_after_rope=True undoes attention.scale and rope.query_growth; unset them"
            )
        if rope.rotary_dim is not None and (rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= self.head_dim):
            raise ValueError(
                f"rope.rotary_dim={rope.rotary_dim} must be even and between 2 and head_dim={self.head_dim}"
            )
        if rope.scaling is not None and rope.scaling.kind == "longrope":
            pairs = (rope.rotary_dim or self.head_dim) // 2
            for name in ("short_factors", "long_factors"):
                if (length := len(getattr(rope.scaling, name))) != pairs:
                    raise ValueError(
                        f"rope.scaling.{name} must have one entry per rotated pair ({pairs}), got {length}"
                    )

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers with a recurrence in place of attention."""
        return () if self.recurrence is None else self.recurrence.layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention, which have a cache each; caches, policies and profiles count these layers only."""
        return tuple(layer for layer in range(self.layers) if layer not in self.recurrent_layers)

    def window(self, layer: int) -> int | None:
        """Returns the sliding window of a layer in tokens, including the token itself; None for full attention."""
        return self.attention.windows[layer] if self.attention.windows else None

    def of_layer(self, layer: int) -> "LlamaConfig":
        """Returns a configuration whose `kv_heads` and `head_dim` are those of a layer."""
        if self.window(layer) is None:
            return self
        kv_heads, head_dim = self.attention.window_kv_heads, self.attention.window_head_dim
        return dataclasses.replace(self, kv_heads=kv_heads or self.kv_heads, head_dim=head_dim or self.head_dim)

    def rotary(self, layer: int = 0, tokens: int | None = None) -> Rotary:
        """Returns the rotary embedding of a layer.

        Args:
            tokens: maximum length of the sequences, on which some scalings depend; `max_length` by default.
        """
        rope, head_dim = self.rope, self.of_layer(layer).head_dim
        growth: dict[str, Any] = {"query_growth": rope.query_growth, "query_period": rope.query_period}
        if layer in rope.nope_layers:
            return Rotary((0.0,) * (head_dim // 2), **growth)
        theta, scaling = rope.layer_theta[layer] if rope.layer_theta else rope.theta, rope.scaling
        if self.window(layer) is not None and rope.window_theta is not None:
            theta, scaling = rope.window_theta, None
        tokens = self.max_length if tokens is None else tokens
        rotary = make_rotary(head_dim, theta, scaling, rotary_dim=rope.rotary_dim, tokens=tokens)
        return dataclasses.replace(rotary, **growth)


GROUPS: dict[str, type] = {
    "attention": AttentionConfig,
    "rope": RopeConfig,
    "norms": NormConfig,
    "scales": ScaleConfig,
    "experts": ExpertConfig,
    "recurrence": RecurrenceConfig,
}


def make_config(fields: Mapping[str, Any]) -> LlamaConfig:
    """Returns a configuration from a mapping without nesting.

    Args:
        fields: values by name; the fields of a group have its name before them, such as "attention.scale".
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        group, _, field = name.rpartition(".")
        groups.setdefault(group, {})[field] = value
    top = groups.pop("", {})
    return LlamaConfig(**top, **{name: GROUPS[name](**values) for name, values in groups.items()})


def field_type(name: str) -> Any:
    """Returns the type of a field by its name as in `make_config`."""
    group, _, field = name.rpartition(".")
    return typing.get_type_hints(GROUPS[group] if group else LlamaConfig)[field]
