"""Figures as PNG files, drawn without a display."""

import pathlib

import matplotlib
import PIL.Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def save(figure: plt.Figure, path: pathlib.Path, dpi: int = 120) -> None:
    """Writes a figure as PNG with 128 colors and closes it.

    Args:
        figure: the figure.
        path: the file; its directory is created.
        dpi: resolution.
    """
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    with PIL.Image.open(path) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)
    plt.close(figure)
