"""Writes tests/golden/kvpress.npz: which tokens kvpress's presses keep on a small random checkpoint.

Needs torch, transformers and kvpress: `python -m tests.golden.make_kvpress_golden` from the repository root, after
`tests.golden.make_transformers_golden`. The settings are those of `tests.models.kvpress_runs.RUNS` and
`SCORED_RUNS`:

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
    for seed in range(100):  # until no choice is close
        tokens = np.random.default_rng(seed).integers(0, families.VOCAB, (2, kvpress_runs.TOKENS))
        runs = {
            name: kvpress_runs.kvpress_mask(run, kvpress_runs.CHECKPOINT, tokens)
            for name, run in kvpress_runs.RUNS.items()
        }
        margins = {name: margin for name, (_, margin) in runs.items()}
        print(f"seed {seed}: margins {margins}")
        if min(margins.values()) > kvpress_runs.MIN_MARGIN:
            break
    else:
        raise RuntimeError(f"no seed with margins over {kvpress_runs.MIN_MARGIN}")
    scored = {
        name: kvpress_runs.scored_press_mask(run, kvpress_runs.CHECKPOINT, tokens)
        for name, run in kvpress_runs.SCORED_RUNS.items()
    }
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("kvpress", "transformers", "torch"))
    kept = {name: kept for name, (kept, _) in runs.items()} | scored
    np.savez_compressed(PATH, tokens=tokens, versions=versions, **kept)
    print(f"{PATH}: {versions}")


if __name__ == "__main__":
    main()
