"""L-Eval: long documents with several questions each (https://github.com/OpenLMLab/LEval).

Multiple choice is scored by likelihood: each option is a continuation of the question, and the option with the largest
mean log-probability per token counts as the answer; the published code reads a generated letter. Short answers are
scored by F1, summaries by ROUGE-L, as published.
"""

import re

from experiments.tasks import data_files, metrics
from experiments.tasks.task import Document, Question, Request, Task, fit_documents

CHOICES = ("quality", "tpo", "coursera")
# File, score and answer length.
ANSWERS = {
    "scientific_qa": ("scientific_qa", metrics.qa_f1, 64),
    "multidoc_qa": ("multidoc_qa", metrics.qa_f1, 64),
    "gov_report": ("gov_report_summ", metrics.rouge_l_letters, 512),
}
TASKS = (*CHOICES, *ANSWERS)
_OPTION = re.compile(r"(?:^|\n)\s*\(?([A-F])[.)]\s*", re.MULTILINE)
_SHORT_ANSWER = (
    "\n\nAnswer the question based on the above text as concisely as you can, using a single phrase or sentence if "
    "possible.\n\nQuestion: {question}"
)


def make_task(name: str, _: str, request: Request) -> Task:
    """Returns a task; documents that do not fit are left out or cut, as requested."""
    file, metric, answer_tokens = ANSWERS.get(name, (name, None, 0))
    ask = _choice_questions if metric is None else _short_questions
    entries = data_files.read_jsonl(request.data_dir, f"leval/{file}.jsonl")
    asked = [ask(entry["instructions"], entry["outputs"]) for entry in entries]
    documents = [
        Document(entry["input"], questions, str(number))
        for number, (entry, questions) in enumerate(zip(entries, asked, strict=True))
        if questions
    ]
    if metric is None:
        longest = max(request.num_tokens(choice) for one in documents for q in one.questions for choice in q.choices)
        return Task(fit_documents(documents, request, longest), kind="choose", answer_tokens=longest)
    return Task(
        fit_documents(documents, request, answer_tokens),
        score=lambda answer, question: metric(answer, question.answers[0]),
        answer_tokens=answer_tokens,
    )


def _short_questions(instructions: list[str], outputs: list[str]) -> tuple[Question, ...]:
    """Returns the questions of a document with short answers or a summary."""
    return tuple(
        Question(_SHORT_ANSWER.format(question=text), (output,), " Answer:")
        for text, output in zip(instructions, outputs, strict=True)
    )


def _choice_questions(instructions: list[str], outputs: list[str]) -> tuple[Question, ...]:
    """Returns the questions of a document that have exactly one correct option."""
    questions = []
    for instruction, output in zip(instructions, outputs, strict=True):
        stem, *parts = _OPTION.split(instruction)
        letters, options = parts[::2], [" ".join(option.split()) for option in parts[1::2]]
        correct = re.match(r"\(?([A-F]+)\b", output.strip())
        if correct is None or correct[1] not in letters or len(set(letters)) < len(letters) or not all(options):
            continue
        text, choices = f"\n\nQuestion: {' '.join(stem.split())}", tuple(f" {option}" for option in options)
        questions.append(Question(text, (str(letters.index(correct[1])),), " Answer:", choices))
    return tuple(questions)
