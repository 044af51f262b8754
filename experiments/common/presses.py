"""kvpress's presses, in a process whose Python environment has torch and kvpress.

    python -m experiments.common.presses MODEL_DIRECTORY DTYPE     # requests and replies are lines of JSON

Only that process imports them. A request gives a text, the number of its tokens that a KV head keeps on average, and
questions. Tokens of a question and its answer are kept in addition, as in kvpress's pipeline, which compresses the text
once and generates the answers.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.common import ROOT


class Press(NamedTuple):
    """A press of kvpress.

    Attributes:
        make: makes the press from the module and the share of tokens to drop.
        eager: whether it needs attention probabilities, which only transformers' eager attention returns.
    """

    make: Callable[[Any, float], Any]
    eager: bool = False


PRESSES = {
    "Random": Press(lambda k, drop: k.RandomPress(drop, seed=0)),
    "Knorm": Press(lambda k, drop: k.KnormPress(drop)),
    "StreamingLLM": Press(lambda k, drop: k.StreamingLLMPress(drop)),
    "SnapKV": Press(lambda k, drop: k.SnapKVPress(drop)),
    "PyramidKV": Press(lambda k, drop: k.PyramidKVPress(drop)),
    "TOVA": Press(lambda k, drop: k.TOVAPress(drop)),
    "ObservedAttention": Press(lambda k, drop: k.ObservedAttentionPress(drop), eager=True),
    "ExpectedAttention": Press(lambda k, drop: k.ExpectedAttentionPress(drop)),
    "KeyDiff": Press(lambda k, drop: k.KeyDiffPress(drop)),
    "LagKV": Press(lambda k, drop: k.LagKVPress(drop)),
    "CUR": Press(lambda k, drop: k.CURPress(drop)),
    "Cap": Press(lambda k, drop: k.CapPress(drop)),
    "NonCausalAttn": Press(lambda k, drop: k.NonCausalAttnPress(drop)),
    "LeverageScore": Press(lambda k, drop: k.LeverageScorePress(drop)),
    "Compactor": Press(lambda k, drop: k.CompactorPress(drop)),
    "KVzip": Press(lambda k, drop: k.KVzipPress(drop)),
    "KVzip, layerwise": Press(lambda k, drop: k.KVzipPress(drop, layerwise=True)),
    "KVzip+": Press(lambda k, drop: k.KVzipPress(drop, kvzip_plus_normalization=True)),
    "KVgrad": Press(lambda k, drop: k.KVgradPress(drop)),
    "KVCompose": Press(lambda k, drop: k.KVComposePress(compression_ratio=drop), eager=True),
    "AdaKV(SnapKV)": Press(lambda k, drop: k.AdaKVPress(k.SnapKVPress(drop))),
    "AdaKV(ExpectedAttention)": Press(lambda k, drop: k.AdaKVPress(k.ExpectedAttentionPress(drop))),
    "AdaKV(LeverageScore)": Press(lambda k, drop: k.AdaKVPress(k.LeverageScorePress(drop))),
    "CriticalKV(SnapKV)": Press(lambda k, drop: k.CriticalKVPress(k.SnapKVPress(drop))),
    "CriticalAdaKV(ExpectedAttention)": Press(lambda k, drop: k.CriticalAdaKVPress(k.ExpectedAttentionPress(drop))),
    "ChunkKV(SnapKV)": Press(lambda k, drop: k.ChunkKVPress(k.SnapKVPress(drop))),
    "EntropyGatedChunkKV(SnapKV)": Press(lambda k, drop: k.EntropyGatedChunkKVPress(k.SnapKVPress(drop))),
    "Chunk(LeverageScore)": Press(lambda k, drop: k.ChunkPress(k.LeverageScorePress(drop))),
    "Block(KeyDiff)": Press(lambda k, drop: k.BlockPress(k.KeyDiffPress(drop))),
    "KeyRerotation(KeyDiff)": Press(lambda k, drop: k.KeyRerotationPress(k.KeyDiffPress(drop))),
    "Merging(KeyDiff)": Press(lambda k, drop: k.MergingPress(k.KeyDiffPress(drop))),
    "Merging(LeverageScore)": Press(lambda k, drop: k.MergingPress(k.LeverageScorePress(drop))),
}

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

    def answer(
        self, press: str, kept: int, text: list[int], questions: Sequence[list[int]], answer_tokens: int
    ) -> dict[str, Any]:
        """Compresses a text and answers questions about it.

        Args:
            press: name of the press.
            kept: tokens of the text that a KV head keeps on average.
            text: tokens of the text.
            questions: tokens of each question.
            answer_tokens: maximum number of tokens of an answer.

        Returns:
            `answers` as text, and the average number of the text's tokens that a KV head keeps (`kept`) and holds
            (`held`); some presses mask dropped tokens and hold them.

        Raises:
            PressFailed: if the press raises an error.
            RuntimeError: if the process ended.
        """
        return self._ask(press=press, kept=kept, text=text, questions=questions, answer_tokens=answer_tokens)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, **request: Any) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._words)} ended; its Python must have torch and kvpress")
        reply = json.loads(line)
        if "error" in reply:
            raise PressFailed(reply["error"])
        return reply


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
        press = PRESSES[request["press"]]
        if press.eager not in pipelines:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation="eager" if press.eager else "sdpa"
            ).eval()
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            pipelines[press.eager] = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
        pipeline = pipelines[press.eager]
        # Half a token more, because presses round down.
        made = press.make(kvpress, 1 - (request["kept"] + 0.5) / len(request["text"]))
        try:
            with torch.no_grad():
                reply = _answer(pipeline, made, request["text"], request["questions"], request["answer_tokens"])
        except Exception as error:  # any error of a press is a result
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _answer(pipeline: Any, press: Any, text: list[int], questions: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Returns the pipeline's answers, and the average number of tokens that a KV head keeps and holds."""
    import torch
    import transformers

    cache = transformers.DynamicCache()
    given = {"context_ids": torch.tensor([text]), "questions_ids": [torch.tensor([question]) for question in questions]}
    answers = pipeline._forward(given, max_new_tokens=tokens, press=press, cache=cache)
    kept, held = _use(pipeline.model, cache)
    return {"answers": answers, "kept": kept, "held": held}


def _use(model: Any, cache: Any) -> tuple[float, float]:
    """Returns the average number of tokens that a KV head keeps and holds."""
    held, kept = 0.0, 0.0
    for layer, stored in zip(model.model.layers, cache.layers, strict=True):
        heads, tokens = stored.keys.shape[1:3]
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        held += tokens
        kept += tokens - (0 if masked is None else len(masked[2]) / heads)
    return kept / len(cache.layers), held / len(cache.layers)


if __name__ == "__main__":
    main(*sys.argv[1:])
