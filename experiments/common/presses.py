"""kvpress's presses, in a process whose Python environment has torch and kvpress.

    python -m experiments.common.presses MODEL_DIRECTORY DTYPE     # requests and replies are lines of JSON

Only that process imports them. A request gives a text, the number of its tokens that a KV head keeps on average, and
questions. Tokens of a question and its answer are kept in addition, as in kvpress's pipeline, which compresses the text
once and generates the answers.
"""

import contextlib
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from experiments.common import ROOT

# A press that wraps another one has it in parentheses.
PRESSES = (
    "Random", "Knorm", "StreamingLLM", "SnapKV", "PyramidKV", "TOVA", "ObservedAttention", "ExpectedAttention",
    "KeyDiff", "LagKV", "CUR", "Cap", "NonCausalAttn", "LeverageScore", "Compactor", "KVzip", "KVzip, layerwise",
    "KVzip+", "KVgrad", "KVCompose", "AdaKV(SnapKV)", "AdaKV(ExpectedAttention)", "AdaKV(LeverageScore)",
    "CriticalKV(SnapKV)", "CriticalAdaKV(ExpectedAttention)", "ChunkKV(SnapKV)", "EntropyGatedChunkKV(SnapKV)",
    "Chunk(LeverageScore)", "Block(KeyDiff)", "KeyRerotation(KeyDiff)", "Merging(KeyDiff)", "Merging(LeverageScore)",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "Random": {"seed": 0}, "KVzip, layerwise": {"layerwise": True}, "KVzip+": {"kvzip_plus_normalization": True},
}  # fmt: skip
# They need attention probabilities, which only transformers' eager attention returns.
EAGER = ("ObservedAttention", "KVCompose")

# The other presses of kvpress, by the reason why they are not compared.
LEFT_OUT = {
    "abstract": ("BasePress", "ScorerPress"),
    "chains presses, but not to a given size": ("ComposedPress",),
    "another press with given shares per layer": ("PerLayerCompressionPress",),
    "needs a delimiter before the question": ("FinchPress",),
    "has a threshold and no ratio": ("SimLayerKVPress",),
    "zeroes channels of keys and drops no token": ("ThinKPress",),
    "needs weights or statistics trained for the model": (
        "DuoAttentionPress", "ExpectedAttentionStatsPress", "FastKVzipPress", "KVzapPress", "LUKVPress", "QFilterPress",
        "RestoreKVPress",
    ),
    "compresses while decoding, not the prompt": (
        "CAMPress", "CompressionRatioDecodingPress", "DMSPress", "DecodingPress", "PrefillDecodingPress",
    ),
}  # fmt: skip


def make_press(kvpress: Any, name: str, drop: float) -> Any:
    """Returns the press of a name in `PRESSES`.

    Args:
        kvpress: the module.
        name: the name.
        drop: share of the tokens to drop.

    Returns:
        The press.
    """
    outer, _, inner = name.removesuffix(")").partition("(")
    make = getattr(kvpress, f"{re.split('[,+]', outer)[0]}Press")
    if inner:
        return make(make_press(kvpress, inner, drop))
    return make(compression_ratio=drop, **SETTINGS.get(name, {}))


class PressFailed(Exception):
    """A press raised an error, whose text this is."""


class Presses:
    """A process that runs presses on a model; the first request starts it."""

    def __init__(self, python: str, directory: pathlib.Path, dtype: str):
        """Stores the command.

        Args:
            python: interpreter of an environment with kvpress.
            directory: Hugging Face directory of the model.
            dtype: "float32" or "bfloat16".
        """
        self._words = [python, "-m", "experiments.common.presses", str(directory.resolve()), dtype]
        self._process: subprocess.Popen | None = None

    def answer(self, **request: Any) -> dict[str, Any]:
        """Compresses a text and answers questions about it.

        Args:
            **request: `press` (its name), `kept` (tokens of the text that a KV head keeps on average), `text` (its
                tokens), `questions` (tokens of each question), `answer_tokens` (maximum length of an answer).

        Returns:
            `answers` as text, and the average number of the text's tokens that a KV head keeps (`kept`) and holds
            (`held`); some presses mask dropped tokens and hold them.

        Raises:
            PressFailed: if the press raises an error.
            RuntimeError: if the process ended.
        """
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin and self._process.stdout
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._words)} ended; its Python must have torch and kvpress")
        reply = json.loads(line)
        if "error" in reply:
            raise PressFailed(reply["error"])
        return reply

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main(directory: str, dtype: str) -> None:
    """Answers one request per line of the standard input.

    Args:
        directory: Hugging Face directory of the model.
        dtype: dtype of the model.
    """
    import kvpress
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    replies, sys.stdout = sys.stdout, sys.stderr  # printed text must not mix with replies
    pipelines: dict[bool, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        is_eager = request["press"] in EAGER
        if is_eager not in pipelines:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation="eager" if is_eager else "sdpa"
            ).eval()
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            pipelines[is_eager] = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
        pipeline = pipelines[is_eager]
        # Half a token more, because presses round down.
        press = make_press(kvpress, request["press"], 1 - (request["kept"] + 0.5) / len(request["text"]))
        try:
            with torch.no_grad():
                reply = _answer(pipeline, press, request["text"], request["questions"], request["answer_tokens"])
        except Exception as error:  # any error of a press is a result
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _answer(pipeline: Any, press: Any, text: list[int], questions: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Returns the pipeline's answers, and the average number of tokens that a KV head keeps and holds."""
    import torch
    import transformers

    cache = transformers.DynamicCache()
    inputs = {
        "context_ids": torch.tensor([text]),
        "questions_ids": [torch.tensor([question]) for question in questions],
    }
    answers = pipeline._forward(inputs, max_new_tokens=tokens, press=press, cache=cache)
    held, masked = 0.0, 0.0
    for layer, stored in zip(pipeline.model.model.layers, cache.layers, strict=True):
        heads, slots = stored.keys.shape[1:3]
        indices = getattr(layer.self_attn, "masked_key_indices", None)
        held += slots
        masked += 0 if indices is None else len(indices[2]) / heads
    layers = len(cache.layers)
    return {"answers": answers, "kept": (held - masked) / layers, "held": held / layers}


if __name__ == "__main__":
    main(*sys.argv[1:])
