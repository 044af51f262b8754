"""`kvjax calibrate`: measures the profile of a model."""

import dataclasses

import numpy as np
import simple_parsing
from tqdm import tqdm

from kvjax_models import profile
from kvjax_models.cli.options import ModelOptions, read_text
from kvjax_models.cli.output import write_output, write_status
from kvjax_models.user_cache import user_cache_directory

_SHOWN_HEADS = 16


@dataclasses.dataclass(frozen=True)
class Calibrate(ModelOptions):
    """Measures which heads of a model retrieve, and saves its profile in the user's cache directory."""

    # A Hugging Face directory, a GGUF file, or a name of `kvjax models` or on the Hugging Face hub.
    model: str = simple_parsing.field(positional=True, metavar="MODEL")
    # Texts like your prompts; by default files of Python and random texts.
    text: list[str] = simple_parsing.field(default_factory=list, nargs="*", required=False, metavar="FILE")
    texts: int = profile.TEXTS  # Maximum number of parts of 1,024 tokens that are read.

    def run(self) -> None:
        """Runs the command; texts that are too short raise a ValueError.

        Raises:
            ValueError: if the number of texts is invalid.
        """
        if self.texts < 1:
            raise ValueError(f"--texts={self.texts} must be at least 1")
        user_cache_directory()  # an error before the measurement, not after it
        sources = [read_text(path) for path in self.text] or None
        llm = self.load()
        with tqdm(desc="measuring", unit="layer", disable=None, leave=False) as bar:
            result = profile.measure(
                llm.model, llm.tokenizer, sources, max_texts=self.texts, progress=profile.progress_of(bar)
            )
        path = profile.save(llm.model, result)
        write_output(describe(result))
        write_status(f"saved as {path}")


def describe(result: profile.Profile) -> str:
    """Returns a summary of a profile.

    Args:
        result: the profile.

    Returns:
        Lines about the heads and the scores.
    """
    heads, needs = result.ranked_heads(), result.needs(profile.RANKING_FRACTION)
    layers = len({layer for layer, _ in heads})
    retrieving = int(np.sum(needs > 0.5))
    shown = " ".join(f"{layer}.{head}:{needs[layer, head]:.0%}" for layer, head in heads[:_SHOWN_HEADS])
    mass = ", ".join(
        f"{kept:.0%} at {fraction:.3g}%"
        for kept, fraction in zip(result.kept_mass, 100 * np.array(profile.FRACTIONS), strict=True)
    )
    return (
        f"{len(heads)} KV heads in {layers} layers without a sliding window.\n"
        f"Heads that keep most of their tokens if all heads share {profile.RANKING_FRACTION:.1%} of the tokens: "
        f"{retrieving}\n"
        f"First heads (layer.head:kept tokens): {shown}\n"
        f"Share of the scores that the kept tokens have: {mass} of the tokens\n"
    )
