"""Losses of long texts and of answers in them, without computing what does not lead to them."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.common.tasks import line_tokenizer
from kvjax_models.llama import Llama

# Queries of a block, at least. Longer blocks compute more of the triangle above the diagonal, shorter ones make the
# products too small. Every block is a part of the program of its own, so there are so many at most.
ATTENTION_BLOCK, MOST_BLOCKS = 128, 16
# From so many tokens on the backward pass computes attention's weights again: those of a batch are gigabytes per layer.
RECOMPUTED_FROM = 4096


@flax.struct.dataclass
class Batch:
    """Padded sequences; answer token a of a row is `targets[row, a]`, predicted at `positions[row, a]`.

    `question` numbers the questions of a row that its answer tokens belong to. Slots past a row's answers have `used`
    False.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B A"]
    targets: Int[Array, "B A"]
    question: Int[Array, "B A"]
    used: Bool[Array, "B A"]


def make_batch(conversations: list[line_tokenizer.Conversation], tokens: int, answer_tokens: int, eos: int) -> Batch:
    """Stacks conversations, padded with eos to `tokens` tokens of which `answer_tokens` are answers."""
    shape = (len(conversations), answer_tokens)
    padded = np.full((len(conversations), tokens), eos, np.int32)
    positions, targets, question = np.zeros(shape, np.int32), np.full(shape, eos, np.int32), np.zeros(shape, np.int32)
    used = np.zeros(shape, bool)
    for row, conversation in enumerate(conversations):
        places = np.flatnonzero(conversation.is_answer)
        padded[row, : len(conversation.tokens)] = conversation.tokens
        positions[row, : len(places)] = places - 1
        targets[row, : len(places)] = conversation.tokens[places]
        question[row, : len(places)] = np.cumsum(np.diff(places, prepend=places[0]) > 1)
        used[row, : len(places)] = True
    return Batch(*map(jnp.asarray, (padded, positions, targets, question, used)))


def causal_attention(
    query: Float[Array, "B T H_q D"], key: Float[Array, "B T H_kv D"], value: Float[Array, "B T H_kv D"]
) -> Float[Array, "B T H_q D"]:
    """Causal attention in blocks of queries, each against the keys up to its end: half the work on a CPU."""
    recomputed = query.shape[1] >= RECOMPUTED_FROM
    attend = jax.checkpoint(jax.nn.dot_product_attention) if recomputed else jax.nn.dot_product_attention
    outputs = []
    block = max(ATTENTION_BLOCK, -(-query.shape[1] // MOST_BLOCKS))
    for start in range(0, query.shape[1], block):
        end = min(start + block, query.shape[1])
        visible = jnp.arange(end) <= jnp.arange(start, end)[:, None]
        outputs.append(attend(query[:, start:end], key[:, :end], value[:, :end], mask=visible[None, None]))
    return jnp.concatenate(outputs, axis=1)


def answer_hidden(model: Llama, tokens: Int[Array, "B T"], positions: Int[Array, "B A"]) -> Float[Array, "B A W"]:
    """`model.hidden(tokens)` at some positions only, for much less: the last layer's queries are those positions."""
    *layers, last = model.layers
    cos, sin = model.rotation(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    x = model.embed(tokens)
    for layer in layers:
        x = layer.finish(x, causal_attention(*layer.project(x, cos, sin)))
    query, key, value = last.project(x, cos, sin)
    query = jnp.take_along_axis(query, positions[:, :, None, None], axis=1)
    visible = jnp.arange(tokens.shape[1]) <= positions[:, None, :, None]
    attended = jax.nn.dot_product_attention(query, key, value, mask=visible)
    return last.finish(jnp.take_along_axis(x, positions[:, :, None], axis=1), attended)


def right_answers(
    logits: Float[Array, "B A V"], batch: Batch, questions: int
) -> tuple[Bool[Array, "B Q"], Bool[Array, "B Q"]]:
    """Which of a row's questions greedy decoding would answer right, and which of the Q slots hold a question.

    The logits were computed with the right answer's earlier tokens as input; where all of an answer's tokens have the
    largest logit, greedy decoding takes just these.
    """
    wrong = (jnp.argmax(logits, axis=-1) != batch.targets) & batch.used
    belongs = (batch.question[:, :, None] == jnp.arange(questions)) & batch.used[:, :, None]
    asked = belongs.any(axis=1)
    return asked & ~(belongs & wrong[:, :, None]).any(axis=1), asked


def answers(
    model: Llama, batch: Batch, questions: int
) -> tuple[Float[Array, "B A"], Bool[Array, "B Q"], Bool[Array, "B Q"]]:
    """Cross-entropy of the answer tokens, 0 in slots that are not used, and `right_answers`."""
    logits = model.logits(answer_hidden(model, batch.tokens, batch.positions))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.where(batch.used, losses, 0.0), *right_answers(logits, batch, questions)


def loss_and_accuracy(model: Llama, batch: Batch, questions: int) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross-entropy of the answer tokens, and the share of questions answered right."""
    losses, right, asked = answers(model, batch, questions)
    return jnp.sum(losses) / jnp.sum(batch.used), jnp.sum(right) / jnp.sum(asked)


def rows_alike(
    model: Llama, batch: Batch, questions: int
) -> tuple[Float[Array, ""], Bool[Array, "B Q"], Bool[Array, "B Q"]]:
    """Mean cross-entropy of a row's answer tokens, mean over rows, and `right_answers`.

    In a mean over all answer tokens tasks with long answers and many questions would leave little to the others.
    """
    losses, right, asked = answers(model, batch, questions)
    return jnp.mean(jnp.sum(losses, axis=1) / jnp.sum(batch.used, axis=1)), right, asked


def text_losses(model: Llama, tokens: Int[Array, "B T1"]) -> Float[Array, "B T"]:
    """Cross-entropy of every token of a text but the first."""
    read, targets = tokens[:, :-1], tokens[:, 1:]
    cos, sin = model.rotation(jnp.broadcast_to(jnp.arange(read.shape[1]), read.shape))
    x = model.embed(read)
    for layer in model.layers:
        x = layer.finish(x, causal_attention(*layer.project(x, cos, sin)))
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(x), targets)
