"""Commands that measure: `python -m experiments.NAME`, one per table or figure."""
