"""How experiments draw: without a display, into files. Import matplotlib from here on, not before."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def save(figure: plt.Figure, path: pathlib.Path) -> None:
    """Writes a figure and frees it; the folder is made."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
