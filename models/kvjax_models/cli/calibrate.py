"""`kvjax calibrate`: measures the layer budgets of a model."""

import copy
import dataclasses
import heapq
import inspect
import pathlib

from kvjax_models import calibration
from kvjax_models.cli.options import ModelOptions, write_output, write_status


@dataclasses.dataclass(frozen=True)
class Calibrate(ModelOptions):
    """Measures the layer budgets of a model for --policy auto, and saves them in the user's cache directory."""

    text_file: str | None = None  # A text in the language of your prompts; documentation of Python by default.
    tokens: int = 1024  # Maximum number of tokens that are read.

    def run(self) -> None:
        """Runs the command; a text that is too short raises a ValueError."""
        if self.tokens < calibration.MIN_TOKENS:
            raise ValueError(f"--tokens={self.tokens} must be at least {calibration.MIN_TOKENS}")
        if self.text_file is None:
            text = "\n\n".join(inspect.cleandoc(part or "") for part in (heapq.__about__, copy.__doc__))
        else:
            text = pathlib.Path(self.text_file).read_text(encoding="utf-8")
        llm = self.load()
        tokens = llm.tokenizer.encode(text)[: self.tokens]
        write_status(f"reading {len(tokens)} tokens twice")
        result = calibration.calibrate(llm.model, tokens)
        path = calibration.save(llm.model, result)
        for fraction, scale in result.scales.items():
            write_output(f"{fraction:6.1%} of the tokens: {' '.join(f'{factor:.2f}' for factor in scale)}\n")
        write_status(f"saved as {path}")
