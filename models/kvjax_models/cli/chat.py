"""`kvjax chat`: a conversation whose earlier turns stand in a compressed cache."""

import dataclasses
import sys
from collections.abc import Iterator

import kvjax
from kvjax_models.cli.options import GenerationOptions, describe_cache, read_text, write_output, write_status
from kvjax_models.formats.tokenizer import Streamer
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState
from kvjax_models.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Chat(GenerationOptions):
    """A conversation: lines of standard input are the user's turns; an empty one, or the end, ends it."""

    context_tokens: int = 4096  # Most tokens of the whole conversation, for which a budget's share counts.
    prompt_file: str | None = None  # A text that the first turn is about, read exactly and then compressed.
    system: str | None = None  # What the model is told before.

    def run(self) -> None:
        about = "" if self.prompt_file is None else read_text(self.prompt_file) + "\n\n"
        conversation = Conversation(self.load(), self, self.system)
        for number, turn in enumerate(_turns()):
            for piece in conversation.answer(turn if number else about + turn):
                write_output(piece)
            write_output("\n")
        if conversation.state is not None:
            assert conversation.generator is not None
            write_status(f"[{self.choice}: {describe_cache(conversation.generator, conversation.state)}]")


class Conversation:
    """Turns behind one another in one cache: each is read once.

    Args:
        llm: whose chat template writes the turns.
        given: how answers are written, and the room.
        system: what stands before the first turn.
    """

    def __init__(self, llm: LanguageModel, given: Chat, system: str | None = None) -> None:
        self.llm, self.given = llm, given
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.generator: Generator | None = None
        self.state: GenerationState | None = None
        self._text = ""  # of all that the cache has read, as the template writes it

    def answer(self, turn: str) -> Iterator[str]:
        """The answer to a user's turn, in pieces as they come.

        Raises:
            ValueError: where there is no chat template, or no room for the turn and an answer.
        """
        self.messages.append({"role": "user", "content": turn})
        text = self.llm.tokenizer.render_chat(self.messages)
        if self.state is not None and text.startswith(self._text):
            tokens = self.llm.tokenizer.encode(text[len(self._text) :], add_bos=False)
        else:  # the first turn, or a template that writes earlier ones anew
            self.state, tokens = None, self.llm.tokenizer.encode(text, add_bos=False)
        read = 0 if self.state is None else int(self.state.positions[0])
        room = min(self.given.max_new_tokens, self.given.context_tokens - read - len(tokens))
        if room < 1:
            raise ValueError(
                f"the conversation has {read} tokens and this turn {len(tokens)}: no room for an answer in "
                f"--context_tokens={self.given.context_tokens}"
            )
        if self.state is None:
            self.generator = self.llm.generator(
                self.given.choice,
                max_prompt_tokens=len(tokens),
                max_new_tokens=self.given.context_tokens - len(tokens),
                sampling=self.given.sampling,
                allow_beyond_context=self.given.allow_beyond_context,
                kv_dtype=self.given.kv_formats,
            )
            self.state = self.generator.init_state(self.given.seed)
        assert self.generator is not None
        self.state = self.generator.prefill(self.state, [tokens])
        yield from self._write(text, tokens, room)

    def _write(self, text: str, tokens: list[int], room: int) -> Iterator[str]:
        assert self.generator is not None and self.state is not None
        streamer, pieces, written = Streamer(self.llm.tokenizer, context=tokens), [], []
        for newest, block in self.generator.decode(self.state, room, 1):
            self.state = newest
            written += block[0].tolist()
            pieces.append("".join(map(streamer.push, block[0].tolist())))
            yield pieces[-1]
        pieces.append(streamer.flush())
        yield pieces[-1]
        kvjax.raise_faults(self.state)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        # With the token that ended the turn, which the template writes, too, and the cache has read.
        self._text = text + self.llm.tokenizer.decode(written, skip_special_tokens=False)


def _turns() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
