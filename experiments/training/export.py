"""What a trained line-retrieval model becomes: measured accuracy and a Hugging Face directory."""

import json
import pathlib
import shutil

import jax
import numpy as np
import tokenizers
import tqdm
from kvjax_models import checkpoint, llama

from experiments.common import results
from experiments.common.tasks import line_retrieval, line_tokenizer
from experiments.training import answer_loss

# Beyond the seeds that experiments with caches use, so that none of their documents decided what was shipped.
_SEED = line_retrieval.EVALUATION_SEED + 1000


def answered(tokenizer: tokenizers.Tokenizer, document: line_retrieval.Document) -> line_tokenizer.Conversation:
    """A document's prompt and its right answer, encoded from their text."""
    prompt = tokenizer.encode(document.context + document.question).ids
    answer = tokenizer.encode(f"{document.answer}{line_tokenizer.EOS}", add_special_tokens=False).ids
    is_answer = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return line_tokenizer.Conversation(np.array(prompt + answer, np.int32), is_answer)


def accuracy(
    model: llama.Llama, tokenizer: tokenizers.Tokenizer, context_tokens: int, documents: int, name: str
) -> results.Row:
    """Share of fresh documents of at least `context_tokens` tokens that exact attention answers, greedily, in full.

    Right is stricter than LongEval's rule: the answer's tokens and the end of the text after them.
    """

    @jax.jit
    def is_right(model: llama.Llama, batch: answer_loss.Batch):
        logits = model.logits(answer_loss.answer_hidden(model, batch.tokens, batch.positions))
        return answer_loss.right_answers(logits, batch, questions=1)[0][0, 0]

    def token_length(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    fresh = line_retrieval.documents(
        _SEED, documents, lambda rng: line_retrieval.generate_for_tokens(rng, token_length, context_tokens)
    )
    longest = context_tokens + 2 * line_tokenizer.TOKENS_PER_LINE
    eos = line_tokenizer.end_of_text(tokenizer)
    right = 0
    for document in tqdm.tqdm(fresh, total=documents, desc=f"{context_tokens} tokens", leave=False):
        conversation = answered(tokenizer, document)
        batch = answer_loss.make_batch([conversation], longest, line_tokenizer.TOKENS_OF_ANSWER, eos)
        right += bool(is_right(model, batch))
    low, high = results.share_interval(right, documents)
    return results.Row(
        experiment="train",
        model=name,
        policy="exact",
        metric="accuracy",
        value=right / documents,
        task="line_retrieval",
        context_tokens=context_tokens,
        question_seen=True,
        ci95_low=low,
        ci95_high=high,
        n=documents,
        seed=_SEED,
    )


def write(
    model: llama.Llama,
    tokenizer: tokenizers.Tokenizer,
    directory: pathlib.Path,
    rows: list[results.Row],
    log: pathlib.Path,
) -> None:
    """Writes model, tokenizer, accuracy and training log as one Hugging Face directory."""
    bos, eos = tokenizer.token_to_id(line_tokenizer.BOS), line_tokenizer.end_of_text(tokenizer)
    checkpoint.save(directory, model, bos_token_id=bos, eos_token_id=eos)
    line_tokenizer.save(tokenizer, directory, model.config.max_length)
    generation = {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    results.write_rows(directory / "accuracy.json", rows)
    shutil.copy(log, directory / "train_log.jsonl")
