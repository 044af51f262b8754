"""Figures as PNG files, drawn without a display."""

import pathlib

import matplotlib
import PIL.Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt

plt.rc("axes", prop_cycle=plt.cycler(color=plt.colormaps["tab20"](range(20))))  # more policies than default colors


def save(figure: plt.Figure, path: pathlib.Path, dpi: int = 120) -> None:
    """Writes a figure as PNG with 128 colors and closes it.

    Args:
        figure: the figure.
        path: the file; its directory is created.
        dpi: resolution.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, bbox_inches="tight")
    with PIL.Image.open(path) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)
    plt.close(figure)
