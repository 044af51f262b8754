"""Figures of compressed caches, for notebooks and pages. They need matplotlib: `pip install 'kvjax[plots]'`."""

import io
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float

try:
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("kvjax_models.plots needs matplotlib; install the extra: pip install 'kvjax[plots]'") from error

_DARK, _LIGHT, _MARK = (0.03, 0.19, 0.42), (0.75, 0.86, 0.96), "#d1495b"
_MAX_LAYER_LABELS = 16


def plot_kept(
    kept: Float[np.ndarray, "L H_kv T"], *, heads: Iterable[tuple[int, int]] | None = None, title: str | None = None
) -> Figure:
    """Draws the tokens that every KV head keeps: a row per head, grouped by layer, and a column per position.

    A token with a slot to itself is dark, merged tokens are lighter, and dropped tokens are white.

    Args:
        kept: shares of slots, as `Document.kept` returns.
        heads: heads to mark at the left edge, as pairs (layer, KV head), such as the most retrieving ones,
            `llm.profile().ranked_heads()[:13]`.

    Returns:
        The figure, which notebooks display; `figure.savefig` writes it to a file.

    Raises:
        ValueError: if `kept` has another shape, or a head does not exist.
    """
    kept = np.asarray(kept, np.float32)
    if kept.ndim != 3 or not kept.size:
        raise ValueError(f"kept has shape {kept.shape}, expected [layers, kv_heads, tokens]")
    layers, kv_heads, tokens = kept.shape
    marked = [] if heads is None else list(heads)
    for layer, head in marked:
        if not (0 <= layer < layers and 0 <= head < kv_heads):
            raise ValueError(f"head {(layer, head)} does not exist in {layers} layers x {kv_heads} heads")
    figure = _NotebookFigure(figsize=(8, min(max(1.5 + 0.05 * layers * kv_heads, 2.5), 9)), layout="constrained")
    axes = figure.subplots()
    # Square root, so that a token in a large cluster differs from a dropped one.
    shade = np.sqrt(np.clip(kept, 0, 1)).reshape(layers * kv_heads, tokens)
    axes.imshow(shade, aspect="auto", cmap=_colors(), vmin=0, vmax=1, interpolation="nearest")
    for layer in range(1, layers):
        axes.axhline(layer * kv_heads - 0.5, color="0.85", linewidth=0.4)
    if marked:
        rows = [layer * kv_heads + head for layer, head in marked]
        marks = axes.scatter(
            np.full(len(rows), -0.008), rows, marker=">", s=14, color=_MARK, clip_on=False,
            transform=axes.get_yaxis_transform(), zorder=3, label="retrieving head",
        )  # fmt: skip
        figure.legend(handles=[marks], loc="outside lower right", frameon=False, fontsize="small")
    step = -(-layers // _MAX_LAYER_LABELS)
    labels = range(0, layers, step)
    axes.set_yticks([(layer + 0.5) * kv_heads - 0.5 for layer in labels], list(map(str, labels)))
    axes.tick_params(axis="y", length=0, pad=10 if marked else 3)
    axes.set(xlabel="position", ylabel="layer" if kv_heads == 1 else f"layer ({kv_heads} KV heads each)")
    if title is not None:
        axes.set_title(title)
    return figure


class _NotebookFigure(Figure):
    """A figure that notebooks display without pyplot, which would keep it open."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def _colors() -> ListedColormap:
    """Returns white for 0 and shades of blue above."""
    shades = np.linspace(_LIGHT, _DARK, 255)
    return ListedColormap(np.concatenate([[(1.0, 1.0, 1.0)], shades]))
