"""`kvjax calibrate`: measures the layer budgets of a model."""

import dataclasses
import pydoc_data.topics

from kvjax_models import calibration
from kvjax_models.cli.options import ModelOptions, read_text, write_output, write_status
from kvjax_models.user_cache import user_cache_directory


@dataclasses.dataclass(frozen=True)
class Calibrate(ModelOptions):
    """Measures the layer budgets of a model for --policy auto, and saves them in the user's cache directory."""

    text_file: str | None = None  # A text in the language of your prompts; the reference of Python by default.
    tokens: int = 2048  # Maximum number of tokens that are read.

    def run(self) -> None:
        """Runs the command; a text that is too short raises a ValueError."""
        if self.tokens < calibration.MIN_TOKENS:
            raise ValueError(f"--tokens={self.tokens} must be at least {calibration.MIN_TOKENS}")
        user_cache_directory()  # an error before the measurement, not after it
        if self.text_file is None:
            text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
        else:
            text = read_text(self.text_file)
        llm = self.load()
        tokens = llm.tokenizer.encode(text)[: self.tokens]
        write_status(f"reading {len(tokens)} tokens twice")
        result = calibration.calibrate(llm.model, tokens)
        path = calibration.save(llm.model, result)
        for fraction, scale in result.scales.items():
            write_output(f"{fraction:6.1%} of the tokens: {' '.join(f'{factor:.2f}' for factor in scale)}\n")
        write_status(f"saved as {path}")
