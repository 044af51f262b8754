"""The pages of results as data, one TOML file a page, and the command that writes them (`python -m experiments.pages`).

`papers/` and `results/` mirror `docs/papers/` and `docs/results/`; `metrics.toml` says how figures of a metric are
written. `experiments.common.sections` reads them.
"""
