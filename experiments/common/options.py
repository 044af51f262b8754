"""What experiments share: a frozen dataclass of options, whose fields are flags, and a function from it to rows."""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import simple_parsing
from absl import app

from experiments.common import results
from experiments.common.results import Row
from kvjax_models import devices
from kvjax_models.cli import parsing

# Of shipped checkpoints, the one that finds lines in longer texts, and the one that knows other tasks, too.
LINES_CHECKPOINT, LANGUAGE_CHECKPOINT = "line-retrieval-2l-4k", "kvjax-lm-2k"


class _Collect(argparse.Action):
    """Values of a flag that is given again and again; the first takes the default's place."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if earlier is self.default else earlier), *values])


def each(*default: Any, choices: Iterable[Any] | None = None) -> Any:
    """A field of several values, whose flag is repeatable."""
    return simple_parsing.field(default=default, action=_Collect, nargs="+", required=False, **_choices(choices))


def one_of(default: Any, choices: Iterable[Any]) -> Any:
    """A field of one value among some."""
    return simple_parsing.field(default=default, **_choices(choices))


def _choices(choices: Iterable[Any] | None) -> dict[str, Any]:
    return {} if choices is None else {"choices": list(choices)}


@dataclasses.dataclass(frozen=True)
class Run(devices.Devices):
    """Options of every experiment."""

    model: str = LINES_CHECKPOINT  # a Hugging Face directory, or the name of a shipped checkpoint
    output_dir: str = "build"  # where results go
    seed: int = 0  # decides documents, sampling and the policies' randomness
    quick: bool = False  # a small run, to see that everything works

    # What a quick run has in place of defaults.
    QUICK: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            known = field.metadata.get("custom_args", {}).get("choices")
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, value := tuple(value))
            for one in value if isinstance(value, tuple) else (value,):
                if known is not None and one is not None and one not in known:
                    raise ValueError(f"--{field.name}={one}: give one of {', '.join(map(str, known))}")

    @classmethod
    def small(cls, **given: Any) -> Self:
        """The options of a quick run."""
        return cls(**{"quick": True, **cls.QUICK, **given})

    def file(self, name: str) -> pathlib.Path:
        """A file among the results."""
        return pathlib.Path(self.output_dir) / name

    def seeds_of(self, count: int) -> range:
        """So many seeds from the first on."""
        return range(self.seed, self.seed + count)


@dataclasses.dataclass(frozen=True)
class Policies(Run):
    """Options of experiments on policies."""

    policy: tuple[str, ...] = each()
    """NAME or NAME:setting=value,..., with @BUDGET for one of its own; repeatable."""
    budget: tuple[str, ...] = each()
    """Slots per head (1024), a share of exact's bytes (25%%) or bytes (64MiB); repeatable."""


class Experiment(NamedTuple):
    """An experiment.

    Attributes:
        name: of its module, and of what it writes.
        options: the dataclass of its options.
        run: from options to rows; prints tables on the way.
        after: of the path of a plot and the rows, once they are written: draws it, or checks them.
    """

    name: str
    options: type[Run]
    run: Callable[[Any], list[Row]]
    after: Callable[[pathlib.Path, Sequence[Row]], None] | None = None

    def write(self, options: Run) -> list[Row]:
        """Runs it, and writes OUTPUT_DIR/NAME.json and what it draws.

        Raises:
            ValueError: where there are no rows, besides what it raises itself.
        """
        rows = self.run(options)
        if not rows:
            raise ValueError("every setting was left out, for the reasons above")
        results.write_rows(options.file(f"{self.name}.json"), rows)
        if self.after is not None:
            self.after(options.file(f"{self.name}.png"), rows)
        if devices.is_first_process():
            print(f"\nResults: {options.file(self.name)}*")
        return rows

    def main(self) -> None:
        """The command."""
        command(self.write, self.options)


def command(function: Callable[[Any], Any], options: type) -> None:
    """Runs a function with options that flags give."""
    app.run(lambda given: function(given) and None, flags_parser=lambda argv: parse(options, argv[1:]))


def parse(options: type, arguments: Sequence[str]) -> Any:
    """Options from flags; in a quick run what is not given is small. Other flags go to absl.

    Raises:
        SystemExit: for what is no flag, with the reason.
    """
    parser = simple_parsing.ArgumentParser(description=sys.modules["__main__"].__doc__, allow_abbrev=False)
    quick = issubclass(options, Run) and any(word in ("--quick", "--quick=true") for word in arguments)
    parser.add_arguments(options, dest="options", default=options.small() if quick else options())  # type: ignore[attr-defined]
    return parsing.parse(parser, arguments).options
