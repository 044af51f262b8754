"""Writes the pages of results anew from rows, and names what has not been run yet, each with its command.

python -m experiments.pages
"""

from experiments.common import page

if __name__ == "__main__":
    found = page.published()
    for path in page.write(found, page.DOCS):
        print(path.relative_to(page.ROOT))
    for command, places in page.not_run(found).items():
        print(f"\nNot run yet: {command}", *places, sep="\n    ")
