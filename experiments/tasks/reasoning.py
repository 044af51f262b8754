"""GSM8K and HumanEval: short prompts and long answers.

- `gsm8k`: worked examples that fill the tokens, then a question; scored by the number after "####", as published
  (https://github.com/openai/grade-school-math).
- `gsm8k_chat`: single questions that the model answers step by step; scored by the last number of the answer.
- `humaneval`: functions to complete; the score runs the answer's code in a process with limits.
- `gsm8k_trace`, `humaneval_trace`: next-token distributions along the full cache's greedy answer, compared with the
  full cache: share of equal most likely tokens, and KL divergence. The argument is the number of tokens.
"""

import re
import subprocess
import sys

from experiments.tasks import data_files
from experiments.tasks.task import Document, Question, Request, Task, longest_that_fits

EXAMPLES = 40  # questions at the end of GSM8K's file that serve as worked examples
ANSWER_TOKENS = 256
CHAT_TOKENS = 512  # of an answer step by step
QUESTIONS = 4  # questions per document of GSM8K
SECONDS, MEMORY = 5, 2**30  # limits of a program of HumanEval
_PASSED = 87  # exit code after all tests; a function that ends the program early has another one
_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."  # as published for Qwen2.5-Math
_LIMITS = f"""import resource
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
"""


def gsm8k(argument: str, request: Request) -> Task:
    """Returns documents of worked examples with questions; the argument is the number of questions."""
    entries = data_files.read_jsonl(request.data_dir, "reasoning/gsm8k_test.jsonl")
    asked, shown, count = entries[:-EXAMPLES], entries[-EXAMPLES:], int(argument or QUESTIONS)

    def document(rng, index: int) -> Document:
        """Makes the document with the questions of an `index`."""
        order = rng.permutation(len(shown))
        questions = tuple(
            Question(f"Question: {one['question']}\n", (_marked_number(one["answer"]),), "Answer:")
            for one in (asked[number % len(asked)] for number in range(index * count, (index + 1) * count))
        )

        def make(size: int) -> Document:
            examples = (shown[number] for number in order[:size])
            return Document("".join(map(_worked_example, examples)), questions)

        return longest_that_fits(make, request, ANSWER_TOKENS, len(shown))

    documents = request.generate(document)
    return Task(documents, score=_score_number, answer_tokens=ANSWER_TOKENS, chat=False, stop="\n\n")


def _worked_example(entry: dict[str, str]) -> str:
    answer = re.sub(r"<<.*?>>", "", entry["answer"])
    return f"Question: {entry['question']}\nAnswer: {answer}\n\n"


def _marked_number(text: str) -> str:
    """Returns the first number after "####", without thousands separators; "" without one."""
    match = re.search(r"#### (-?[0-9.,]+)", text)
    return match[1].replace(",", "") if match else ""


def _score_number(answer: str, question: Question) -> float:
    """Returns 1 if the marked number of an answer has the digits of the correct one."""
    return float(_marked_number(answer) == question.answers[0])


def gsm8k_chat(argument: str, request: Request) -> Task:
    """Returns single questions; the argument is the maximum number of tokens of an answer, whose last number counts."""
    entries = request.select(data_files.read_jsonl(request.data_dir, "reasoning/gsm8k_test.jsonl"))
    documents = tuple(
        Document(entry["question"], (Question(_BOXED, (_marked_number(entry["answer"]),)),), str(number))
        for number, entry in enumerate(entries)
    )
    return Task(documents, score=_score_last_number, answer_tokens=int(argument or CHAT_TOKENS))


def _score_last_number(answer: str, question: Question) -> float:
    """Returns 1 if the last number of an answer equals the correct one."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(question.answers[0]))


def gsm8k_trace(argument: str, request: Request) -> Task:
    """Returns single questions of GSM8K, for traces of `argument` tokens."""
    entries = request.select(data_files.read_jsonl(request.data_dir, "reasoning/gsm8k_test.jsonl"))
    question = Question(" Think step by step.", ())
    documents = tuple(Document(entry["question"], (question,), str(number)) for number, entry in enumerate(entries))
    return Task(documents, kind="trace", answer_tokens=int(argument or ANSWER_TOKENS))


def humaneval(argument: str, request: Request) -> Task:
    """Returns functions to complete; the argument must be "run", because the score runs generated code.

    Raises:
        ValueError: without the argument.
    """
    if argument != "run":
        raise ValueError("humaneval runs code that the model writes; pass humaneval:run to allow it")
    return Task(_functions(request), score=passes_tests, answer_tokens=ANSWER_TOKENS, chat=False)


def _functions(request: Request) -> tuple[Document, ...]:
    """Returns functions to complete, with their tests and prompts as answers."""
    documents = []
    for entry in request.select(data_files.read_jsonl(request.data_dir, "reasoning/humaneval.jsonl.gz")):
        tests = f"{entry['test']}\ncheck({entry['entry_point']})\n"
        documents.append(Document(entry["prompt"], (Question("", (tests, entry["prompt"])),), entry["task_id"]))
    return tuple(documents)


def passes_tests(answer: str, question: Question) -> float:
    """Runs a completed function with its tests, in a process with limits of time and memory.

    Args:
        answer: the generated code; it ends at the first line that does not belong to the function.
        question: the tests and the prompt.

    Returns:
        1 if all tests pass, otherwise 0.
    """
    tests, prompt = question.answers
    body = re.split(r"\n(?=[^\s#])", answer)[0]
    program = f"{_LIMITS}{prompt}{body}\n{tests}\nraise SystemExit({_PASSED})"
    words = [sys.executable, "-I", "-c", program]
    try:
        done = subprocess.run(words, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(done.returncode == _PASSED)


def humaneval_trace(argument: str, request: Request) -> Task:
    """Returns functions to complete, for traces of `argument` tokens."""
    return Task(_functions(request), kind="trace", answer_tokens=int(argument or ANSWER_TOKENS), chat=False)


TASKS = {
    "gsm8k": gsm8k,
    "gsm8k_chat": gsm8k_chat,
    "gsm8k_trace": gsm8k_trace,
    "humaneval": humaneval,
    "humaneval_trace": humaneval_trace,
}
