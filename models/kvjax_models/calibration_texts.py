"""Texts on which `profile.measure` measures a model, from files of Python itself and from random generators.

No download is needed, and every installation has texts of all kinds. Generated texts depend on their seed only.
"""

import contextlib
import functools
import html
import importlib
import inspect
import json
import pathlib
import pydoc_data.topics
import random
import re
import sysconfig
from collections.abc import Callable, Mapping, Sequence

from kvjax_models.formats.tokenizer import Tokenizer

_LENGTH = 60_000  # characters of each kind of text
_PART = 4000  # characters that are taken from one topic, module or file, so that the chunks differ

_MODULES = (
    "heapq", "textwrap", "json.decoder", "fractions", "queue", "shlex", "difflib", "csv", "statistics", "tempfile",
    "configparser", "calendar", "string", "bisect", "zipfile", "ast", "sched", "glob", "fnmatch", "hashlib",
)  # fmt: skip
# IDLE and the license are not part of every installation; docstrings replace them.
_FILES = ("idlelib/help.html", "LICENSE.txt", "idlelib/README.txt", "idlelib/NEWS.txt", "idlelib/NEWS2x.txt")
_DOCUMENTED = (
    "decimal", "doctest", "optparse", "threading", "pickle", "typing", "unittest", "random", "cmd", "argparse",
)  # fmt: skip

# Words and phrases of generated texts: a kind in each paragraph.
_VOCABULARY = """
first name: Anna; Bruno; Chloe; Dmitri; Elif; Farid; Greta; Hiro; Imani; Jonas; Keiko; Lars; Mina; Noor; Otto; Priya;
Quentin; Rosa; Samir; Tove; Uma; Viktor; Wanda; Xavier; Yusuf; Zofia

last name: Abara; Bellini; Castro; Dahl; Eriksen; Fontaine; Gupta; Hoffmann; Ivanova; Jansen; Kowalski; Lindqvist;
Moreau; Nakamura; Okafor; Petrov; Quist; Rossi; Sato; Tanaka; Ulrich; Vargas; Weber; Yilmaz; Zeller

place: Bergen; Cusco; Dakar; Essen; Fukuoka; Gdansk; Hanoi; Izmir; Jaipur; Krakow; Lyon; Malmo; Nantes; Oaxaca; Porto;
Quito; Riga; Seville; Tbilisi; Utrecht; Valencia; Windhoek; Yerevan; Zagreb

thing: a copper kettle; a box of glass slides; the green ledger; two sacks of barley; an old barometer; a bicycle
without a saddle; the map of the valley; a crate of oranges; the spare rudder; a roll of blue cloth; three clay jars;
a bundle of letters; the brass telescope; a wooden flute; the longest ladder; a tin of paint; the station clock; a jar
of honey

deed: repaired the roof of the mill; counted the boats in the harbor; taught the children to read a compass; planted
forty young plum trees; copied the parish register by hand; measured the depth of the well; sorted the mail before
sunrise; painted the shutters of the inn; tuned the piano in the town hall; wrote a report about the flood; translated
a book of recipes; took photographs of the eclipse; built a wall along the orchard; drove the night bus to the coast

weather: It had rained since the morning; The wind came from the north; Snow was still lying on the pass; The heat
made everybody slow; Fog covered the river; The evening was mild and clear; A storm had taken down the telephone line;
The first frost had come early

feeling: relieved; curious; tired; suspicious; cheerful; worried; proud; doubtful; grateful; impatient

job: surveyor; baker; nurse; carpenter; geologist; clerk; pilot; gardener; printer; teacher; welder; archivist

product: lamp; valve; desk; sensor; rope; pump; filter; cable; hinge; battery; gasket; tripod

state: open; closed; pending; shipped; returned; archived; failed; paid

level: DEBUG; INFO; INFO; INFO; WARNING; ERROR

event: connection from {host} accepted; request {id} finished in {n} ms; cache miss for key {id}; retry {k} of job
{id}; user {name} logged in; disk {k} is {p}% full; file {id}.dat written, {n} bytes; timeout after {n} ms while
reading from {host}; queue length is {n}
"""


def texts() -> dict[str, str]:
    """Returns one long text of each kind.

    Returns:
        Texts by kind: reference, records, story, source, dialogue and prose.
    """
    return {
        "reference": _reference(),
        "records": _generate(_records, seed=1),
        "story": _generate(_story, seed=2),
        "source": _source(),
        "dialogue": _generate(_dialogue, seed=3),
        "prose": _prose(),
    }


def make_chunks(tokenizer: Tokenizer, sources: Sequence[str], tokens: int, count: int) -> list[list[int]]:
    """Encodes texts in chunks: the first chunk of each text, then the second one of each text, and so on.

    Every chunk starts with the BOS token if the model has one. The last tokens of a text are left out unless the text
    is shorter than a chunk.

    Args:
        tokenizer: the tokenizer of the model.
        sources: the texts.
        tokens: maximum number of tokens of a chunk.
        count: maximum number of chunks.

    Returns:
        Token ids of each chunk.
    """
    prefix = list(tokenizer.prefix_ids)
    size = tokens - len(prefix)
    bodies: list[list[list[int]]] = []
    for source in filter(None, sources):
        ids = tokenizer.encode(source[: 20 * tokens * count])  # of long files, more than what is needed
        ids = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
        bodies.append([ids[first : first + size] for first in range(0, max(len(ids) - size, 0) + 1, size)])
    longest = max((len(body) for body in bodies), default=0)
    interleaved = [body[number] for number in range(longest) for body in bodies if number < len(body)]
    return [prefix + chunk for chunk in interleaved[:count]]


def _reference() -> str:
    """Returns Python's reference, the beginning of each topic."""
    return "\n\n".join(text[:_PART] for _, text in sorted(pydoc_data.topics.topics.items()))[:_LENGTH]


def _source() -> str:
    """Returns source code of the standard library."""
    parts = []
    for name in _MODULES:
        with contextlib.suppress(ImportError, OSError):  # distributions without sources
            parts.append(inspect.getsource(importlib.import_module(name))[:_PART])
    return "\n\n".join(parts)[:_LENGTH]


def _prose() -> str:
    """Returns documentation that is installed with Python, and docstrings."""
    parts, directory = [], pathlib.Path(sysconfig.get_path("stdlib"))
    for name in _FILES:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = (directory / name).read_text(encoding="utf-8")
            text = html.unescape(re.sub(r"<(script|style|head).*?</\1>|<[^>]*>", "", text, flags=re.DOTALL))
            parts.append(re.sub(r"\s*\n\s*\n\s*", "\n\n", text).strip())
    for name in _DOCUMENTED:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            documented = [module, *(value for _, value in sorted(vars(module).items()) if inspect.isclass(value))]
            parts.append("\n\n".join(inspect.getdoc(value) or "" for value in documented))
    # Parts of all files take turns, so that no chunk consists of one license.
    turns = range(0, max(map(len, parts), default=0), _PART)
    return "\n\n".join(part[turn : turn + _PART] for turn in turns for part in parts if part[turn:])[:_LENGTH]


def _generate(make_part: Callable[[random.Random], str], seed: int) -> str:
    """Returns a text of random parts."""
    rng, parts, length = random.Random(seed), [], 0
    while length < _LENGTH:
        parts.append(make_part(rng))
        length += len(parts[-1])
    return "\n\n".join(parts)[:_LENGTH]


@functools.cache
def _vocabulary() -> dict[str, list[str]]:
    """Returns words and phrases by kind."""
    paragraphs = (" ".join(paragraph.split()).partition(": ") for paragraph in _VOCABULARY.split("\n\n"))
    return {kind: phrases.split("; ") for kind, _, phrases in paragraphs}


def _pick(rng: random.Random, kind: str) -> str:
    """Returns a random word or phrase of a kind."""
    return rng.choice(_vocabulary()[kind])


def _person(rng: random.Random) -> str:
    return f"{_pick(rng, 'first name')} {_pick(rng, 'last name')}"


def _word(rng: random.Random, length: int = 8) -> str:
    return "".join(rng.choice("abcdefghijkmnpqrstuvwxyz23456789") for _ in range(length))


def _record(rng: random.Random) -> dict[str, str | int | float]:
    """Returns the fields of one order."""
    return {
        "id": _word(rng),
        "customer": _person(rng),
        "city": _pick(rng, "place"),
        "item": _pick(rng, "product"),
        "count": rng.randrange(1, 500),
        "price": rng.randrange(100, 99_999) / 100,
        "state": _pick(rng, "state"),
        "date": f"20{rng.randrange(10, 30)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}",
    }


def _records(rng: random.Random) -> str:
    """Returns records in JSON, CSV, as settings or as a log."""
    form, rows = rng.randrange(4), [_record(rng) for _ in range(rng.randrange(6, 14))]
    if form == 0:
        return json.dumps(rows, indent=rng.choice((None, 2)))
    if form == 1:
        return "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)])
    if form == 2:
        return "\n".join(f"{row['item']}.{row['id']}.{key} = {row[key]}" for row in rows for key in ("city", "count"))
    return "\n".join(_log_line(rng) for _ in range(20))


def _log_line(rng: random.Random) -> str:
    time = f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}.{rng.randrange(1000):03}"
    fields: Mapping[str, str | int] = {
        "host": f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}",
        "id": _word(rng, 6),
        "n": rng.randrange(2, 90_000),
        "k": rng.randrange(1, 10),
        "p": rng.randrange(1, 100),
        "name": _pick(rng, "first name").lower(),
    }
    return f"{time} {_pick(rng, 'level')} [worker-{rng.randrange(16)}] {_pick(rng, 'event').format(**fields)}"


def _fact(rng: random.Random) -> str:
    """Returns a sentence with an invented fact."""
    person, other, place = _pick(rng, "first name"), _person(rng), _pick(rng, "place")
    thing, job = _pick(rng, "thing"), _pick(rng, "job")
    year, number = rng.randrange(1890, 2030), rng.randrange(3, 4000)
    return rng.choice(
        (
            f"{person} has lived in {place} since {year} and works as a {job}.",
            f"In {year} {other}, a {job}, {_pick(rng, 'deed')}.",
            f"The house at {number} {_pick(rng, 'last name')} Street belongs to {other}.",
            f"{person} sold {thing} to {other} for {number} crowns.",
            f"The road from {place} to {_pick(rng, 'place')} is {number} kilometers long.",
            f"{other} was born in {place} on the {rng.randrange(2, 28)}th of May {year}.",
            f"The bridge in {place} was closed for {number} days, and nobody could say why.",
            f"The {job} remembered that {person} had left {thing} in {place}.",
        )
    )


def _story(rng: random.Random) -> str:
    """Returns a short story or a letter."""
    hero, friend, place = _pick(rng, "first name"), _pick(rng, "first name"), _pick(rng, "place")
    sentences = [f"{_pick(rng, 'weather')} when {hero} came to {place} with {_pick(rng, 'thing')}."]
    for _ in range(rng.randrange(6, 12)):
        sentences.append(
            rng.choice(
                (
                    _fact(rng),
                    f"{friend} {_pick(rng, 'deed')}, and {hero} was {_pick(rng, 'feeling')}.",
                    f"{_pick(rng, 'weather')}, so they stayed for {rng.randrange(2, 30)} days.",
                    f'"Where is {_pick(rng, "thing")}?" asked {friend}. {hero} looked {_pick(rng, "feeling")}.',
                    f"Nobody in {place} knew that the {_pick(rng, 'job')} once {_pick(rng, 'deed')}.",
                )
            )
        )
    if rng.random() < 0.4:
        date = f"{_pick(rng, 'place')}, {rng.randrange(1, 29)} March {rng.randrange(1900, 2030)}"
        return f"{date}\n\nDear {friend},\n\n{' '.join(sentences)}\n\nYours,\n{hero}"
    return f"{' '.join(sentences[:5])}\n\n{' '.join(sentences[5:])}"


def _dialogue(rng: random.Random) -> str:
    """Returns a conversation about facts that are stated in it."""
    one, two = rng.sample(_vocabulary()["first name"], 2)
    lines = []
    for _ in range(rng.randrange(4, 9)):
        fact, place, thing = _fact(rng), _pick(rng, "place"), _pick(rng, "thing")
        question, answer = rng.choice(
            (
                (f"What do you know about {place}?", fact),
                (f"Did you bring {thing}?", f"No, {_pick(rng, 'first name')} took it to {place}. {fact}"),
                ("Can you say that again?", f"Of course. {fact}"),
                (f"I heard that you {_pick(rng, 'deed')}.", f"That was {rng.randrange(2, 30)} years ago. {fact}"),
                (f"{fact} Is that right?", f"Yes, and I am {_pick(rng, 'feeling')} about it."),
            )
        )
        lines += [f"{one}: {question}", f"{two}: {answer}"]
    return "\n".join(lines)
