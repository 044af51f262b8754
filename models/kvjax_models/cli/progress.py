"""A progress line on the terminal."""

import sys
import threading
from collections.abc import Sequence

from kvjax_models.devices import is_first_process
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState


def is_terminal() -> bool:
    """Returns whether standard error is a terminal, which shows progress."""
    return sys.stderr is not None and sys.stderr.isatty()


class ProgressLine:
    """A line on standard error that is overwritten; it is shown on terminals only."""

    def __init__(self, quiet: bool = False) -> None:
        """Creates the line.

        Args:
            quiet: whether to show nothing.
        """
        self._is_shown = is_terminal() and not quiet and is_first_process()

    def show(self, text: str) -> None:
        """Replaces the line by a text; an empty text removes it."""
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()


def prefill(
    generator: Generator,
    state: GenerationState,
    prompts: Sequence[Sequence[int]],
    line: ProgressLine,
    stop: threading.Event | None = None,
) -> GenerationState:
    """Processes prompts like `Generator.prefill` and shows the progress.

    Args:
        generator: the generator.
        state: state before the prompts; its buffers are donated.
        prompts: token ids of each row.
        line: the progress line; empty afterwards.
        stop: an event that ends the processing after a step.

    Returns:
        The state after the prompts.

    Raises:
        InterruptedError: if `stop` was set; the state is lost.
    """
    tokens = f"{sum(map(len, prompts)):,} tokens"
    line.show(f"compiling, then reading {tokens} ...")
    for number, result in enumerate(generator.prefill_steps(state, prompts), 1):
        line.show(f"reading {tokens}: step {number} ...")
        if stop is not None and stop.is_set():
            line.show("")
            raise InterruptedError("reading the prompt was interrupted")
        new_state = result
    assert new_state is not None
    new_state.logits.block_until_ready()
    line.show("")
    return new_state
