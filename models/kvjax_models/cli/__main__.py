"""Makes `python -m kvjax_models.cli` equivalent to `kvjax`."""

from kvjax_models.cli import run

run()
