"""`kvjax models` and `kvjax download`: lists and downloads models that have a short name."""

import dataclasses

import simple_parsing

from kvjax.messages import format_bytes
from kvjax_models import known_models
from kvjax_models.cli.output import format_table, write_output, write_status


@dataclasses.dataclass(frozen=True)
class Models:
    """Lists the models that have a short name, and whether they are downloaded."""

    def run(self) -> None:
        """Runs the command."""
        write_output(list_models())


@dataclasses.dataclass(frozen=True)
class Download:
    """Downloads a model of `kvjax models` with pip; prints its path."""

    name: str = simple_parsing.field(positional=True, metavar="NAME")  # Name of the model.

    def run(self) -> None:
        """Runs the command; raises the errors of `known_models.download`."""
        if model := known_models.KNOWN_MODELS.get(self.name):
            write_status(f"{model.title}, {format_bytes(model.size)}, license {model.license}; {model.note}")
        write_output(f"{known_models.download(self.name)}\n")


def list_models() -> str:
    """Returns a table of all known models."""
    lines = [("name", "state", "size", "context", "license", "model")]
    for model in known_models.KNOWN_MODELS.values():
        state = "downloaded" if model.is_downloaded else "not downloaded"
        lines.append((model.name, state, format_bytes(model.size), str(model.context), model.license, model.title))
    directory = next(iter(known_models.KNOWN_MODELS.values())).path.parent
    more = f"`kvjax download NAME` downloads a model to {directory}. --model takes its name."
    return f"{format_table(lines)}\n{more}\n"
