"""Writes the pages of results anew from rows, and names what has not been run yet, each with its command.

python -m experiments.pages
python -m experiments.pages --take build/device/throughput/h200/results.json --profile h200    # with another machine's
"""

import dataclasses
import pathlib

from experiments.common import page
from experiments.common.jobs import PROFILES
from experiments.common.options import command, each, one_of


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command."""

    take: tuple[str, ...] = each()  # results.json of `experiments.all` on another machine, to be published; repeatable
    profile: str = one_of("h200", PROFILES)
    """What they were run with."""


def main(options: Options) -> None:
    for path in options.take:
        page.publish(page.load(pathlib.Path(path)), options.profile)
    found = page.published()
    for written in page.write(found, page.DOCS):
        print(written.relative_to(page.ROOT))
    for typed, places in page.not_run(found).items():
        print(f"\nNot run yet: {typed}", *places, sep="\n    ")


if __name__ == "__main__":
    command(main, Options)
