"""`kvjax chat`: a conversation whose earlier turns are in a compressed cache."""

import dataclasses
import sys
import threading
from collections.abc import Iterator

from kvjax_models.cli import interrupts, progress
from kvjax_models.cli.options import GenerationOptions, describe_prefix, read_text
from kvjax_models.cli.output import write_output
from kvjax_models.engine import seed_of_prompt
from kvjax_models.language_model import LanguageModel
from kvjax_models.prefix import Prefix

_CONTEXT_TOKENS = 4096  # of a conversation by default


@dataclasses.dataclass(frozen=True)
class Chat(GenerationOptions):
    """Holds a conversation: each line of standard input is a turn of the user; an empty line or its end exits."""

    context_tokens: int | None = None  # Maximum length, which a budget's share refers to; 4096 or the model's limit.
    prompt_file: str | None = None  # A text to prepend to the first turn.
    system: str | None = None  # System message.

    def run(self) -> None:
        """Runs the command."""
        self.check()
        document = "" if self.prompt_file is None else read_text(self.prompt_file) + "\n\n"
        conversation = Conversation(self.load(), self, self.system)
        for turn in _read_turns():
            with interrupts.deferred() as stop:
                for text in conversation.answer(document + turn, stop):
                    write_output(text)
            if conversation.has_answer:
                document = ""
            write_output("\n")
        if (prefix := conversation.prefix) is not None:
            self.write_summary(describe_prefix(prefix))


class Conversation:
    """A conversation in one cache; each turn is processed once.

    Attributes:
        messages: the messages, of which the last one is an answer.
        engine: an engine with one row.
        prefix: the conversation with its cache; None before the first answer and after one that ended at a stop string.
    """

    def __init__(self, llm: LanguageModel, options: Chat, system: str | None = None) -> None:
        """Starts a conversation.

        Args:
            llm: the model, with a chat template.
            options: how answers are generated, and the maximum length.

        Raises:
            ValueError: if the maximum length exceeds the model's.
        """
        self.llm, self.options = llm, options
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.context_tokens = _context_tokens(options, llm.model.config.max_length)
        self.engine = options.cache(llm).engine(rows=1, max_prefill_tokens=1, stream_interval=1)
        self.prefix: Prefix | None = None
        self._text = ""  # the rendered conversation in the prefix

    @property
    def has_answer(self) -> bool:
        """Whether a turn was read entirely."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def answer(self, turn: str, stop: threading.Event | None = None) -> Iterator[str]:
        """Answers a turn of the user; raises a ValueError if the model has no chat template.

        Args:
            turn: text of the user.
            stop: an event that ends the answer after a step. A turn that was not read entirely is forgotten.

        Yields:
            Parts of the answer.

        Raises:
            ValueError: if the turn and an answer exceed the maximum length.
        """
        messages = [*self.messages, {"role": "user", "content": turn}]
        text = self.llm.tokenizer.render_chat(messages, template_options=self.options.chat_options)
        if self.prefix is not None and not text.startswith(self._text):
            self.prefix = None  # the template changes earlier turns
        before = () if self.prefix is None else self.prefix.tokens
        tokens = self.llm.tokenizer.encode_continuation(text[len(self._text) if before else 0 :], before)
        max_new_tokens = min(self.options.max_new_tokens, self.context_tokens - len(before) - len(tokens))
        if max_new_tokens < 1:
            raise ValueError(
                f"a conversation of {len(before)} tokens and a turn of {len(tokens)} leave no tokens for an answer "
                f"within --context_tokens={self.context_tokens}"
            )
        self.engine.add(
            tokens,
            self.prefix,
            sampling=self.options.sampling,
            max_new_tokens=max_new_tokens,
            seed=seed_of_prompt(self.options.seed, len(self.messages)),
            keep=True,
            room=self.context_tokens - len(tokens),  # for all turns
        )
        parts: list[str] = []
        for output in progress.outputs(self.engine, quiet=self.options.quiet, stop=stop):
            if output.text:
                parts.append(output.text)
                yield output.text
            if output.finish_reason is None:
                continue
            if output.finish_reason == "abort" and output.prefix is None:
                return
            self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]
            self.prefix = output.prefix
            if self.prefix is not None:
                # With the end-of-text token, which the template renders and the cache contains, too.
                new_tokens = self.prefix.tokens[len(before) + len(tokens) :]
                self._text = text + self.llm.tokenizer.decode_continuation(
                    new_tokens, [*before, *tokens], skip_special_tokens=False
                )


def _context_tokens(options: Chat, max_length: int) -> int:
    """Returns the maximum length of a conversation.

    Raises:
        ValueError: if the requested one exceeds the model's context length.
    """
    tokens = options.context_tokens
    if tokens is None:
        return min(_CONTEXT_TOKENS, max_length)
    if tokens > max_length and not options.allow_beyond_context:
        raise ValueError(
            f"--context_tokens={tokens} exceeds the model's context length of {max_length}; pass at most {max_length}, "
            "or --allow_beyond_context true"
        )
    return tokens


def _read_turns() -> Iterator[str]:
    """Reads the user's turns.

    Yields:
        Lines of standard input.

    Raises:
        OSError: if standard input is closed.
    """
    if sys.stdin is None:
        raise OSError("standard input is closed")
    while True:
        if sys.stdin.isatty() and sys.stderr is not None:
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
