"""`kvjax chat`: a conversation whose earlier turns are in a compressed cache."""

import dataclasses
import sys
from collections.abc import Iterator

import kvjax
from kvjax_models.cli import progress
from kvjax_models.cli.options import GenerationOptions, describe_cache, read_text, write_output
from kvjax_models.formats.tokenizer import Streamer
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState
from kvjax_models.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Chat(GenerationOptions):
    """Holds a conversation: each line of standard input is a turn of the user; an empty line or its end exits."""

    context_tokens: int = 4096  # Maximum number of tokens of the conversation, which a budget's share refers to.
    prompt_file: str | None = None  # A text to prepend to the first turn.
    system: str | None = None  # System message.

    def run(self) -> None:
        """Runs the command."""
        self.check()
        document = "" if self.prompt_file is None else read_text(self.prompt_file) + "\n\n"
        conversation = Conversation(self.load(), self, self.system)
        for number, turn in enumerate(_read_turns()):
            for text in conversation.answer(turn if number else document + turn):
                write_output(text)
            write_output("\n")
        if conversation.state is not None:
            assert conversation.generator is not None
            self.write_summary(describe_cache(conversation.generator, conversation.state))


class Conversation:
    """A conversation in one cache; each turn is processed once."""

    def __init__(self, llm: LanguageModel, options: Chat, system: str | None = None) -> None:
        """Starts a conversation.

        Args:
            llm: the model, with a chat template.
            options: how answers are generated, and the maximum length.
            system: system message.
        """
        self.llm, self.options = llm, options
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.generator: Generator | None = None
        self.state: GenerationState | None = None
        self._cached_text = ""  # the rendered conversation in the cache
        self._cached_tokens: list[int] = []

    def answer(self, turn: str) -> Iterator[str]:
        """Answers a turn of the user; raises a ValueError if the model has no chat template.

        Args:
            turn: text of the user.

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
        max_new_tokens = min(self.options.max_new_tokens, self.options.context_tokens - position - len(tokens))
        if max_new_tokens < 1:
            raise ValueError(
                f"a conversation of {position} tokens and a turn of {len(tokens)} leave no tokens for an answer within "
                f"--context_tokens={self.options.context_tokens}"
            )
        if self.state is None:
            self.generator = self.llm.generator(
                self.options.choice,
                max_prompt_tokens=len(tokens),
                max_new_tokens=self.options.context_tokens - len(tokens),
                sampling=self.options.sampling,
                allow_beyond_context=self.options.allow_beyond_context,
                kv_dtype=self.options.kv_formats,
            )
            self.state = self.generator.init_state(self.options.seed)
        assert self.generator is not None
        line = progress.ProgressLine(self.options.quiet)
        self.state = progress.prefill(self.generator, self.state, [tokens], line)
        self._cached_tokens += tokens
        yield from self._generate(text, max_new_tokens)

    def _generate(self, text: str, max_new_tokens: int) -> Iterator[str]:
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
        parts.append(streamer.flush())
        yield parts[-1]
        kvjax.raise_faults(self.state)
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        # With the end-of-text token, which the template renders and the cache contains, too.
        self._cached_text = text + self.llm.tokenizer.decode_continuation(
            new_tokens, self._cached_tokens, skip_special_tokens=False
        )
        self._cached_tokens += new_tokens


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
