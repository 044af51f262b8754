"""`kvjax calibrate`: measures the budgets that a model's layers need.

kvjax calibrate --model smollm2-135m
kvjax generate --model smollm2-135m --policy snapkv:layer_budget_scale=auto --budget 25% --prompt_file FILE
"""

import dataclasses

from kvjax_models.calibration import calibrate, save_calibration
from kvjax_models.cli.options import ModelOptions, read_text, write_output, write_status


@dataclasses.dataclass(frozen=True)
class Calibrate(ModelOptions):
    """Measures how much of a budget each layer needs, for layer_budget_scale=auto."""

    text_file: str | None = None  # A text like those to be compressed; the Python reference by default.
    budget_fraction: float = 0.25  # Fraction of the full cache for which budgets are measured.
    max_tokens: int = 2048  # Length to which the text is shortened.

    def run(self) -> None:
        """Runs the command."""
        text = None if self.text_file is None else read_text(self.text_file)
        llm = self.load()
        calibration = calibrate(llm, text, budget=self.budget_fraction, max_tokens=self.max_tokens)
        lines = ["layer  scale  scales of the KV heads"]
        for number, (scale, heads) in enumerate(zip(calibration.layer_scale, calibration.head_scale, strict=True)):
            lines.append(f"{number:5}  {scale:5.2f}  {' '.join(f'{head:.2f}' for head in heads)}")
        write_output("\n".join(lines) + "\n")
        path = save_calibration(llm.model, calibration)
        write_status(f"[{calibration.tokens} tokens; layer_budget_scale=auto takes these scales from {path}]")
