"""`python -m kvjax_models.command` is `kvjax`."""

from kvjax_models.command import run

run()
