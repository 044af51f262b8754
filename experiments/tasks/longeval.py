"""LongEval's retrieval of lines and topics: the published prompts, and generated lines of any length.

Prompts, word lists and the parsing of answers are LongEval's (LongChat, lm-sys, https://github.com/DachengLi1/LongChat,
Apache-2.0), which draws the names of lines from the package `wonderwords`.
"""

import functools
import re

import numpy as np
import wonderwords

from experiments.tasks import data_files
from experiments.tasks.task import Document, Question, Request, Task, contains, longest_that_fits

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
LINE = "line {name}: REGISTER_CONTENT is <{number}>\n"
LINES_QUESTION = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {name}? I need the number."
TOPICS_END = "Now the record ends."
MAX_NUMBER = 50_000
ANSWER_TOKENS = 32  # long enough for a sentence that repeats the question


@functools.cache
def _words(category: str) -> tuple[str, ...]:
    """Returns words for names of lines: lowercase ASCII, sorted."""
    words = wonderwords.RandomWord().filter(include_categories=[category], regex="[a-z]+")
    return tuple(sorted(set(wonderwords.filter_profanity(words))))


def last_number(answer: str, question: Question) -> float:
    """Returns 1 if the last number of an answer is the correct one, as LongEval scores."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == int(question.answers[0]))


def lines(argument: str, request: Request) -> Task:
    """Returns records of lines that fill the tokens; the argument is the number of questions per record."""
    questions = int(argument or 1)
    documents = request.generate(lambda rng, _: generate_lines(rng, questions, request))
    return Task(documents, score=last_number, answer_tokens=ANSWER_TOKENS)


def generate_lines(rng: np.random.Generator, questions: int, request: Request) -> Document:
    """Returns the longest record of lines that fits.

    Args:
        rng: determines names, numbers and questions.
        questions: number of questions.
        request: maximum number of tokens.

    Returns:
        The document.
    """
    adjectives, nouns = _words("adjective"), _words("noun")
    count = max(request.tokens // 4, questions)  # a line has more than four tokens
    chosen = rng.choice(len(adjectives) * len(nouns), size=count, replace=False)
    names = [f"{adjectives[index // len(nouns)]}-{nouns[index % len(nouns)]}" for index in chosen]
    numbers = rng.integers(1, MAX_NUMBER, size=count, endpoint=True).tolist()
    places = rng.random(questions)

    def make(size: int) -> Document:
        """Makes a record of `size` lines."""
        record = "".join(LINE.format(name=names[index], number=numbers[index]) for index in range(size))
        asked = [int(place * size) for place in places]
        texts = [Question(LINES_QUESTION.format(name=names[one]), (str(numbers[one]),)) for one in asked]
        return Document(HEADER + record, tuple(texts))

    return longest_that_fits(make, request, ANSWER_TOKENS, count)


def published_lines(argument: str, request: Request) -> Task:
    """Returns LongEval's published prompts of `argument` lines (200, 300 or 400)."""
    entries = data_files.read_jsonl(request.data_dir, f"longeval/lines_{argument or 200}.jsonl")
    documents = []
    for number, entry in enumerate(entries):
        before, mark, after = entry["prompt"].partition("\nNow the record is over.")
        question = Question(mark + after.rstrip(), (str(entry["expected_number"]),))
        documents.append(Document(before, (question,), str(number)))
    return Task(tuple(request.select(documents)), score=last_number, answer_tokens=ANSWER_TOKENS)


def published_topics(argument: str, request: Request) -> Task:
    """Returns LongEval's published conversations about `argument` topics (5, 10 or 15).

    An answer is right if it contains the topic. LongEval asks another model whether it is right.
    """
    entries = data_files.read_jsonl(request.data_dir, f"longeval/topics_{argument or 5}.jsonl")
    documents = []
    for entry in entries:
        before, mark, after = entry["prompt"].partition(TOPICS_END)
        question = Question(f"{mark}{after}", (entry["topics"][0],))
        documents.append(Document(before, (question,), str(entry["test_id"])))
    return Task(tuple(request.select(documents)), score=contains, answer_tokens=ANSWER_TOKENS)


TASKS = {"lines": lines, "longeval_lines": published_lines, "longeval_topics": published_topics}
