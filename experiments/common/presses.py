"""kvpress's presses, which really run: in a process of their own, whose environment has torch and kvpress.

    python -m experiments.common.presses MODEL_DIRECTORY     # asked and answered in lines of JSON

Only that process imports them. A press is asked for a number of tokens that each kv head keeps of a text, on average;
tokens of the question and of the answer come on top, as in kvpress's own pipeline, whose code answers.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.common import ROOT


class Press(NamedTuple):
    """A press of the package kvpress for a share of tokens to drop."""

    make: Callable[[Any, float], Any]
    eager: bool = False  # needs attention's probabilities, which only transformers' slow attention gives


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

_TRAINED = "needs weights or statistics trained for the model"
_DECODING = "compresses while decoding, not the prompt"
# What kvpress has besides, and why it is not compared.
LEFT_OUT = {
    "BasePress": "abstract",
    "ScorerPress": "abstract",
    "ComposedPress": "chains others, of which none compresses to a given size",
    "PerLayerCompressionPress": "another press with shares for every layer, which it needs to be told",
    "FinchPress": "needs the question behind a delimiter",
    "SimLayerKVPress": "has a threshold and no ratio",
    "ThinKPress": "zeroes channels of keys and drops no token",
    "DuoAttentionPress": _TRAINED,
    "ExpectedAttentionStatsPress": _TRAINED,
    "FastKVzipPress": _TRAINED,
    "KVzapPress": _TRAINED,
    "LUKVPress": _TRAINED,
    "QFilterPress": _TRAINED,
    "RestoreKVPress": _TRAINED,
    "CAMPress": _DECODING,
    "CompressionRatioDecodingPress": _DECODING,
    "DMSPress": _DECODING,
    "DecodingPress": _DECODING,
    "PrefillDecodingPress": _DECODING,
}


class PressFailed(Exception):
    """A press that ended with an error; the text is that error's."""


class Presses:
    """The process that runs presses on a model, started at the first question.

    Args:
        python: the interpreter of an environment with kvpress.
        directory: the model's.
    """

    def __init__(self, python: str, directory: pathlib.Path) -> None:
        self._words = [python, "-m", __name__, str(directory.resolve())]
        self._process: subprocess.Popen | None = None

    def answer(
        self, press: str, kept: int, prompts: Sequence[tuple[list[int], list[int]]], answer_tokens: int
    ) -> dict[str, Any]:
        """Answers to questions, as tokens, behind compressed texts.

        Args:
            kept: tokens of each text that a kv head keeps on average.
            prompts: tokens of text and question.

        Returns:
            `answers`, and, per text, what a head of a layer keeps on average (`kept`) and what it holds (`held`), in
            tokens: some presses only mask what they drop.

        Raises:
            PressFailed: with the press's own error.
            RuntimeError: when the process ended.
        """
        return self._ask(press=press, kept=kept, prompts=prompts, answer_tokens=answer_tokens)

    def losses(self, press: str, kept: int, texts: Sequence[list[int]], position: int) -> dict[str, Any]:
        """Negative log-likelihoods, one per text: the mean over the tokens from `position` + 1 on, read behind the
        compressed tokens before `position`."""
        prompts = [(text[:position], text[position:]) for text in texts]
        return self._ask(press=press, kept=kept, prompts=prompts, answer_tokens=0)

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
            raise RuntimeError(f"{' '.join(self._words)} ended; it must be able to import kvpress")
        reply = json.loads(line)
        if "error" in reply:
            raise PressFailed(reply["error"])
        return reply


def main(directory: str) -> None:
    """Answers requests, a line each, until there are no more."""
    import kvpress
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever is printed is no reply
    pipelines: dict[bool, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        press = PRESSES[request["press"]]
        if press.eager not in pipelines:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager" if press.eager else "sdpa"
            ).eval()
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            pipelines[press.eager] = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
        pipeline = pipelines[press.eager]
        reply: dict[str, Any] = {"answers": [], "losses": [], "kept": [], "held": []}
        try:
            with torch.no_grad():
                for text, behind in request["prompts"]:
                    # Half a token more than is to stay, so that rounding down leaves it.
                    made = press.make(kvpress, 1 - (request["kept"] + 0.5) / len(text))
                    if request["answer_tokens"]:
                        answer, kept, held = _answer(pipeline, made, text, behind, request["answer_tokens"])
                        reply["answers"].append(answer)
                    else:
                        loss, kept, held = _loss(pipeline, made, text, behind)
                        reply["losses"].append(loss)
                    reply["kept"].append(kept)
                    reply["held"].append(held)
        except Exception as error:  # whatever a press raises is what came of it
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _answer(pipeline: Any, press: Any, text: list[int], question: list[int], tokens: int) -> tuple[str, float, float]:
    """What kvpress's pipeline answers, and what a head of a layer keeps and holds of the text."""
    import torch
    import transformers

    cache = transformers.DynamicCache()
    given = {"context_ids": torch.tensor([text]), "questions_ids": [torch.tensor([question])]}
    (answer,) = pipeline._forward(given, max_new_tokens=tokens, press=press, cache=cache)
    return answer, *_use(pipeline.model, cache)


def _loss(pipeline: Any, press: Any, text: list[int], behind: list[int]) -> tuple[float, float, float]:
    """The mean negative log-likelihood of the tokens behind a text but the first, and the same."""
    import torch
    import transformers

    model, cache = pipeline.model, transformers.DynamicCache()
    with press(model):
        model.model(input_ids=torch.tensor([text]), past_key_values=cache)
    first = cache.get_seq_length() if type(press).__name__ == "KeyRerotationPress" else len(text)
    kept, held = _use(model, cache)
    positions = torch.arange(first, first + len(behind))[None]
    logits = model(input_ids=torch.tensor([behind]), past_key_values=cache, position_ids=positions).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(behind[1:]))
    return float(loss), kept, held


def _use(model: Any, cache: Any) -> tuple[float, float]:
    """Tokens that a head of a layer keeps, and those that it holds, on average."""
    held, kept = 0.0, 0.0
    for layer, stored in zip(model.model.layers, cache.layers, strict=True):
        heads, tokens = stored.keys.shape[1:3]
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        held += tokens
        kept += tokens - (0 if masked is None else len(masked[2]) / heads)
    return kept / len(cache.layers), held / len(cache.layers)


if __name__ == "__main__":
    main(sys.argv[1])
