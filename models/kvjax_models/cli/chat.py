"""`kvjax chat`: a conversation whose earlier turns are in a compressed cache."""

import dataclasses
import sys
import threading
from collections.abc import Iterator

import kvjax
from kvjax_models.cli import interrupts, progress
from kvjax_models.cli.options import GenerationOptions, describe_sizes, read_text
from kvjax_models.cli.output import write_output
from kvjax_models.formats.tokenizer import Streamer
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState, compact_layers
from kvjax_models.language_model import LanguageModel

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
            if conversation.state is not None:
                document = ""
            write_output("\n")
        if conversation.state is not None:
            assert conversation.generator is not None
            sizes = conversation.generator.cache_sizes(conversation.state)
            self.write_summary(describe_sizes(sizes, conversation.generator.describe_share(sizes)))


class Conversation:
    """A conversation in one cache; each turn is processed once."""

    def __init__(self, llm: LanguageModel, options: Chat, system: str | None = None) -> None:
        """Starts a conversation.

        Args:
            llm: the model, with a chat template.
            options: how answers are generated, and the maximum length.
            system: system message.

        Raises:
            ValueError: if the maximum length exceeds the model's.
        """
        self.llm, self.options = llm, options
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.context_tokens = _context_tokens(options, llm.model.config.max_length)
        self.generator: Generator | None = None
        self.state: GenerationState | None = None
        self._cached_text = ""  # the rendered conversation in the cache
        self._cached_tokens: list[int] = []

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
        self.messages.append({"role": "user", "content": turn})
        text = self.llm.tokenizer.render_chat(self.messages, template_options=self.options.chat_options)
        if self.state is not None and text.startswith(self._cached_text):
            new_text = text[len(self._cached_text) :]
        else:  # the first turn, or a template that changes earlier turns
            self.state, self._cached_tokens, new_text = None, [], text
        tokens = self.llm.tokenizer.encode_continuation(new_text, self._cached_tokens)
        position = 0 if self.state is None else int(self.state.positions[0])
        max_new_tokens = min(self.options.max_new_tokens, self.context_tokens - position - len(tokens))
        if max_new_tokens < 1:
            raise ValueError(
                f"a conversation of {position} tokens and a turn of {len(tokens)} leave no tokens for an answer within "
                f"--context_tokens={self.context_tokens}"
            )
        if self.state is None:
            self.generator = self.options.cache(self.llm).generator(
                max_prompt_tokens=len(tokens), max_new_tokens=self.context_tokens - len(tokens)
            )
            self.state = self.generator.init_state(self.options.seed, self.options.sampling)
        assert self.generator is not None
        line = progress.ProgressLine(self.options.quiet)
        try:
            self.state = progress.prefill(self.generator, self.state, [tokens], line, stop)
        except InterruptedError:
            self.messages.pop()
            self.state = None  # its buffers were donated; the next turn reads the conversation again
            return
        self._cached_tokens += tokens
        yield from self._generate(text, max_new_tokens, stop)

    def _generate(self, text: str, max_new_tokens: int, stop: threading.Event | None) -> Iterator[str]:
        """Generates an answer.

        Yields:
            Parts of the answer.
        """
        assert self.generator is not None and self.state is not None
        streamer, parts, new_tokens = Streamer(self.llm.tokenizer, self._cached_tokens), [], []
        for new_state, block in self.generator.decode(self.state, max_new_tokens, 1):
            self.state = new_state
            new_tokens += block[0].tolist()
            parts.append("".join(map(streamer.push, block[0].tolist())))
            yield parts[-1]
            if stop is not None and stop.is_set():
                self.state = compact_layers(self.state)  # as after the last token of an answer
                break
        parts.append(streamer.flush())
        yield parts[-1]
        kvjax.raise_faults(self.state)
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        # With the end-of-text token, which the template renders and the cache contains, too.
        self._cached_text = text + self.llm.tokenizer.decode_continuation(
            new_tokens, self._cached_tokens, skip_special_tokens=False
        )
        self._cached_tokens += new_tokens


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
