"""lm-evaluation-harness's tasks through compressed caches: its model "kvjax".

    python -m kvjax_models.lm_eval --model kvjax --model_args path=DIR,policy=subgen,budget=25% --tasks gsm8k

is the harness's own command with one model more. `pip install 'kvjax[harness]'` brings it.

A prompt is read exactly and compressed, and what follows goes through the cache: generated tokens, and the
continuations whose likelihood a task asks. So a compressed cache has seen the question. Where a task's documents and
questions come apart at words that stand before every question, `split_at` compresses what stands before them alone:
`split_at=Question:` (the last place where they stand).
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import lm_eval.models  # noqa: F401 (the harness registers its own only where there is none yet)
import numpy as np
from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

import kvjax
from kvjax_models.generation.batching import Request
from kvjax_models.generation.completions import generate_completions
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.sampling import Sampling
from kvjax_models.language_model import load

_LOG = logging.getLogger(__name__)
# Caches are made for a few lengths, four to an octave from here on, so that few programs are compiled.
_SHORTEST = 64
_BESIDE = {"do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p"}  # of a request, what is known


@register_model("kvjax")
class KvjaxLM(TemplateLM):
    """A checkpoint under a cache policy.

    Args:
        path: a Hugging Face directory, or a model's name on the hub.
        policy, budget: as for `kvjax_models.load(path).generate`; a share is one of what exact holds for the longest
            prompt of those that share caches' sizes, at most a fifth longer.
        batch_size: rows that are read and written side by side; answers are written by continuous batching.
        max_length: most tokens of a prompt and what follows it; the model's own by default. Longer prompts lose their
            first tokens, as they do in the harness's other models, and a warning says how many did.
        max_gen_toks: most tokens of an answer where a task does not say.
        dtype: of parameters and arithmetic ("float32"); the file's own by default.
        seed: of policies' randomness; the nth request to write samples with seed + n.
        split_at: what stands before every question, see above.
        add_bos_token: whether what the checkpoint puts before a text is put before prompts.

    Raises:
        ValueError: what `load` and the policy refuse, and arguments that are not known.
    """

    def __init__(
        self,
        path: str,
        policy: str = "exact",
        budget: int | str | None = None,
        *,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        dtype: str | None = None,
        seed: int = 0,
        split_at: str | None = None,
        add_bos_token: bool = True,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size={batch_size!r}; it must be a number of rows")
        self.llm = load(path, None if dtype is None else jnp.dtype(dtype))
        self.policy, self.budget, self.batch_size, self.seed = policy, budget, int(batch_size), seed
        longest = self.llm.model.config.max_length
        self.max_length = longest if max_length is None else int(max_length)
        if not 2 <= self.max_length <= longest:
            raise ValueError(f"max_length={max_length}; it must lie in [2, {longest}], which the model knows")
        self.max_gen_toks, self.split_at, self.add_bos_token = max_gen_toks, split_at, add_bos_token
        self.tokenizer = self.llm.tokenizer
        self.path = path
        # A policy or a budget that cannot be is an error before anything is read.
        self.generator(self.max_length // 2, self.max_length // 2)

    @property
    def tokenizer_name(self) -> str:
        return str(self.path).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        if not self.tokenizer.eos_ids:
            raise ValueError("the checkpoint names no token that ends a text (eos_token_id)")
        return self.tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        # As the harness has it: also of a tokenizer that puts nothing before texts itself.
        named = self.tokenizer.special_tokens.get("bos_token")
        token = None if named is None else self.tokenizer.backend.token_to_id(named)
        return self.eot_token_id if token is None else token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        add = self.add_bos_token if add_special_tokens is None else add_special_tokens
        plain = self.tokenizer.encode(string, add_bos=False)
        prefix = list(self.tokenizer.prefix_ids) if add else []
        return plain if plain[: len(prefix)] == prefix else prefix + plain  # chat templates write it themselves

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.render_chat(chat_history, add_generation_prompt)

    def generator(self, max_prompt_tokens: int, max_new_tokens: int, sampling: Sampling | None = None) -> Generator:
        """Caches for prompts of so many tokens, and as many after them, or a little more of both."""
        prompt, new = round_up_length(max_prompt_tokens), round_up_length(max_new_tokens)
        if prompt + new > self.max_length:
            prompt, new = max_prompt_tokens, max_new_tokens
        return self.llm.generator(
            self.policy,
            self.budget,
            batch=self.batch_size,
            max_prompt_tokens=prompt,
            max_new_tokens=new,
            sampling=sampling,
        )

    def _batches(self, requests: Sequence[Any], length: Any) -> Iterator[tuple[list[int], list[Any]]]:
        """Numbers of requests and, of as many as there are rows, these: the longest first, the last one repeated."""
        order = sorted(range(len(requests)), key=lambda number: -length(requests[number]))
        for begin in tqdm(range(0, len(order), self.batch_size), desc="kvjax"):
            numbers = order[begin : begin + self.batch_size]
            chosen = [requests[number] for number in numbers]
            yield numbers, chosen + chosen[-1:] * (self.batch_size - len(chosen))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found: list[Any] = [None] * len(requests)
        asked = [(*self._shortened(context, len(wanted)), wanted) for _, context, wanted in requests]
        for numbers, batch in self._batches(asked, lambda one: sum(map(len, one))):
            read, wanted = [part for part, _, _ in batch], [rest + wanted for _, rest, wanted in batch]
            generator = self.generator(max(map(len, read)), max(map(len, wanted)))
            state = generator.prefill(generator.init_state(self.seed), read)
            state, scored, likeliest = generator.score_greedy(state, wanted)
            kvjax.raise_faults(state)
            for number, (_, rest, _), row, best in zip(numbers, batch, scored, likeliest, strict=False):
                found[number] = (float(np.sum(row[len(rest) :], dtype=np.float64)), bool(best[len(rest) :].all()))
                pair = requests[number][0]
                if pair is not None:
                    self.cache_hook.add_partial("loglikelihood", pair, found[number])
        return found

    def _shortened(self, context: list[int], following: int) -> tuple[list[int], list[int]]:
        """A context's last tokens that leave room for so many, in what is compressed and what is read after it."""
        room = self.max_length - following
        if room < 1:
            raise ValueError(f"{following} tokens leave no room for a prompt in max_length={self.max_length}")
        if len(context) > room:
            _LOG.warning("a prompt of %d tokens loses its first %d", len(context), len(context) - room)
            context = context[-room:]
        if self.split_at is None:
            return context, []
        text = self.tokenizer.decode(context, skip_special_tokens=False)
        place = text.rfind(self.split_at)
        if place < 1:
            return context, []
        rest = self.tokenizer.encode(text[place:], add_bos=False)
        return context[: max(len(context) - len(rest), 1)], context[max(len(context) - len(rest), 1) :]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for number, request in enumerate(requests):
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            ):
                context, wanted = utils.make_disjoint_window(window)
                windows.append((None, context, wanted))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (likelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):  # type: ignore[arg-type]
            totals[owner] += likelihood
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found: list[Any] = [None] * len(requests)
        # Those that are asked for alike, and go into caches of one size.
        kinds: dict[tuple[str, int], tuple[dict[str, Any], list[Request]]] = {}
        for number, request in enumerate(requests):
            text, given = request.args
            most = parse_generation_kwargs(given, self.max_gen_toks)[1]
            read, rest = self._shortened(self.tok_encode(text), most)
            kind = repr(sorted(given.items())), round_up_length(len(read) + len(rest))
            kinds.setdefault(kind, (given, []))[1].append(
                Request(read, most, rest, (self.seed + number) % 2**32, number)
            )
        with tqdm(total=len(requests), desc="kvjax", disable=disable_tqdm) as bar:
            for given, alike in kinds.values():
                until, most, sampling = parse_generation_kwargs(given, self.max_gen_toks)
                longest, following = (max(len(getattr(one, name)) for one in alike) for name in ("prompt", "question"))
                generator = self.generator(longest, following + most, sampling)
                for one in generate_completions(self.tokenizer, generator, alike, stop=until):
                    found[one.number] = one.text
                    self.cache_hook.add_partial("generate_until", requests[one.number].args, one.text)
                    bar.update()
        return found


def parse_generation_kwargs(given: dict[str, Any], max_gen_toks: int) -> tuple[list[str], int, Sampling]:
    """What ends an answer, its most tokens, and how tokens are chosen.

    Raises:
        ValueError: for what a request asks and is not known.
    """
    if unknown := given.keys() - _BESIDE:
        raise ValueError(f"a request asks for {', '.join(sorted(unknown))}; known: {', '.join(sorted(_BESIDE))}")
    until = given.get("until") or []
    until = [until] if isinstance(until, str) else [end for end in until if end]
    temperature = float(given.get("temperature") or 0.0)
    if not given.get("do_sample", temperature > 0):
        return until, int(given.get("max_gen_toks", max_gen_toks)), Sampling()
    top_k, top_p = given.get("top_k"), given.get("top_p")
    sampling = Sampling(temperature or 1.0, top_k=top_k or None, top_p=top_p)
    return until, int(given.get("max_gen_toks", max_gen_toks)), sampling


def round_up_length(tokens: int) -> int:
    """The next length that caches are made for."""
    return math.ceil(2 ** (math.ceil(4 * math.log2(max(tokens, _SHORTEST))) / 4))


if __name__ == "__main__":
    cli_evaluate()
