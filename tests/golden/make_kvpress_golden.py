"""Writes tests/golden/kvpress.npz: which tokens kvpress's presses keep on a small random checkpoint.

Needs torch, transformers and kvpress: `python -m tests.golden.make_kvpress_golden` from the repository root, after
`tests.golden.make_transformers_golden`. The settings are those of `tests.models.kvpress_runs.RUNS`:

    tokens    [2, 96] int64                     random prompts
    NAME      [layers, 2, H_kv, 96] bool        tokens kept in the run of that name
    versions  str                               of kvpress, transformers and torch
"""

import importlib.metadata
import pathlib

import numpy as np

from tests.models import families, kvpress_runs

PATH = pathlib.Path(__file__).parent / "kvpress.npz"


def main() -> None:
    tokens = np.random.default_rng(0).integers(0, families.VOCAB, (2, kvpress_runs.TOKENS))
    kept = {
        name: kvpress_runs.kvpress_mask(run, kvpress_runs.CHECKPOINT, tokens) for name, run in kvpress_runs.RUNS.items()
    }
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("kvpress", "transformers", "torch"))
    np.savez_compressed(PATH, tokens=tokens, versions=versions, **kept)
    print(f"{PATH}: {versions}")


if __name__ == "__main__":
    main()
