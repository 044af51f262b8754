"""Code that several experiments use."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]  # root of the checkout
