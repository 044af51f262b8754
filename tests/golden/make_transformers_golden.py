"""Writes tests/golden/transformers: a small checkpoint per family with what transformers computes from it.

Needs torch and transformers: `python -m tests.golden.make_transformers_golden` from the repository root, for all
families or those that are named behind it. Each family's directory is a Hugging Face checkpoint (bfloat16) and
`golden.npz`:

    tokens    [2, 48] int64      random input
    logits    [2, 48, 64] float32
    prompt    [2, 8] int64       the first tokens of `tokens`
    greedy    [2, 64] int64      greedy continuation of the prompt
    margin    float32            least gap between the best two logits along it: a port nearer than that must agree
    versions  str                of transformers and torch
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

from tests.models import families

ROOT = pathlib.Path(__file__).parent / "transformers"
PROMPT, CONTINUATION, LEAST_MARGIN = 8, 64, 2e-3


def greedy(model, prompt: np.ndarray, steps: int) -> tuple[np.ndarray, float]:
    """Greedy tokens [B, steps] by whole forward passes (no cache whose own rules could differ), and the margin."""
    tokens, margin = prompt, np.inf
    for _ in range(steps):
        last = families.hf_logits(model, tokens)[:, -1]
        best = np.sort(last, axis=-1)
        margin = min(margin, float((best[:, -1] - best[:, -2]).min()))
        tokens = np.concatenate([tokens, last.argmax(-1)[:, None]], axis=1)
    return tokens[:, prompt.shape[1] :], margin


def write(family: families.Family) -> None:
    directory = ROOT / family.name
    tokens = np.random.default_rng(0).integers(0, families.VOCAB, (2, families.SEQUENCE))
    for seed in range(100):  # until no choice of the continuation is close
        model = families.write(family, directory, seed=seed, bfloat16=True)
        continuation, margin = greedy(model, tokens[:, :PROMPT], CONTINUATION)
        if margin > LEAST_MARGIN and len(np.unique(continuation)) > 8:
            break
    else:
        raise RuntimeError(f"{family.name}: no seed with a margin over {LEAST_MARGIN}")
    (directory / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
        directory / "golden.npz",
        tokens=tokens,
        logits=families.hf_logits(model, tokens),
        prompt=tokens[:, :PROMPT],
        greedy=continuation,
        margin=np.float32(margin),
        versions=f"transformers {transformers.__version__}, torch {torch.__version__}",
    )
    print(f"{family.name}: seed {seed}, margin {margin:.4f}, {len(np.unique(continuation))} distinct tokens")


if __name__ == "__main__":
    for each in families.GOLDEN:
        if each.name in (sys.argv[1:] or [each.name]):
            write(each)
