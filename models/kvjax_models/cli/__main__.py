"""`python -m kvjax_models.cli` is `kvjax`."""

from kvjax_models.cli import run

run()
