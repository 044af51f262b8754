"""Tasks from published files, with small files of the published forms."""

import functools
import gzip
import json
import re

import numpy as np
import pytest

from experiments import tasks
from experiments.tasks import facts, leval, longeval, metrics, needle, questions, reasoning, records
from experiments.tasks.reasoning import passes_tests
from experiments.tasks.task import Document, Question, contains, cut_middle, fit_documents
from tests.experiments.support import request


def contents():
    """Returns the contents of small files of every form, by path."""
    squad = [
        {"paragraphs": [
            {"context": f"{name} {number} was built in {1900 + number}.",
             "qas": [{"question": f"When was {name} {number} built?", "answers": [{"text": str(1900 + number)}]}]}
            for number in range(3)]}
        for name in ("Mill", "Bridge", "Tower", "Well")
    ]  # fmt: skip
    hotpotqa = [
        {"question": f"Who wrote book {n}?", "answer": f"Author {n}", "supporting_facts": [[f"Book {n}", 0]],
         "context": [[f"Book {n}", [f"It is by Author {n}.", " It is long."]], ["Other", [f"Nothing of {n}."]]]}
        for n in range(6)
    ]  # fmt: skip
    musique = [
        {"question": f"Q{n}?", "answer": f"A{n}", "answer_aliases": [f"B{n}"], "answerable": n != 3,
         "paragraphs": [{"title": "T", "paragraph_text": f"Text {n} {k}.", "is_supporting": k < 2} for k in range(4)]}
        for n in range(4)
    ]  # fmt: skip
    nq = [{"question": f"q{n}", "answers": [f"a{n}"],
           "ctxs": [{"title": "T", "text": f"a{n} is it.", "isgold": True}]} for n in range(9)]  # fmt: skip
    pairs = [[f"key-{n}", f"value-{n}"] for n in range(75)]
    objects = [{"ordered_kv_records": pairs, "key": f"key-{n}", "value": f"value-{n}"} for n in (7, 70)]
    story = "1 Ann went to the garden.\n2 Bob went home.\n3 Where is Ann? \tgarden\t1\n4 Ann went out.\n"
    story += "5 Where is Ann?|out|4"
    text = "\n".join(f"This is sentence {number} of a long book." for number in range(3000))
    prompt = "The record:\nline a-b: REGISTER_CONTENT is <12>\n\nNow the record is over. Tell me what is in line a-b? "
    topics = {"prompt": "USER: cats. Now the record ends. What is the first topic?", "topics": ["Cats", "x"]}
    instructions = ["Which?\n (A) one\n(B) two", "Two?\nA. x\nB. y"]
    exam = {"input": "A text.", "instructions": instructions, "outputs": ["(B) two", "AB"]}
    short = {"input": "A text. " * 50, "instructions": ["Who?"], "outputs": ["the old Ann"]}
    asked = [{"Q": "Who lit the lamp?", "A": "The keeper.", "S": ["The keeper\nlit the lamp."]},
             {"Q": "Who came last?", "A": "Ann", "S": "It was late. Ann came."}]  # fmt: skip
    long = f"The keeper lit the lamp. {'Words. ' * 300}It was late. Ann came. {'Words. ' * 50}"
    texts = [{"input": text, "qa_pairs": str(asked)} for text in (long, "Short.")]
    cloze = [{"Q": "<mask-0> met <mask-1>.", "A": {"<mask-0>": "Ann", "<mask-1>": "Bo"}, "S": "Ann met Bo."}]
    gsm8k = [{"question": f"{n} and {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n},000"}
             for n in range(50)]  # fmt: skip
    code = {"task_id": "H/0", "prompt": "def f(x):\n", "entry_point": "f"}
    return {
        "qa/xquad_en.json": json.dumps({"data": squad}),
        "qa/hotpotqa.json": json.dumps(hotpotqa),
        "qa/musique.json": json.dumps(musique),
        "qa/nq_open_oracle.jsonl.gz": nq,
        "kv_retrieval/75_keys.jsonl.gz": objects,
        "babi/qa1_single_test.txt": f"{story}\n{story}",
        **dict.fromkeys(("books/a.txt", "wikitext2/test.txt", "essays/b.txt"), text),
        "longeval/lines_200.jsonl": [{"prompt": prompt, "expected_number": 12}] * 2,
        "longeval/topics_5.jsonl": [topics | {"test_id": 1}],
        "leval/quality.jsonl": [exam],
        "leval/scientific_qa.jsonl": [short, {**short, "input": "A text. " * 900}],
        **dict.fromkeys(("loogle/shortdep_qa.jsonl", "loogle/longdep_qa.jsonl"), texts),
        "loogle/shortdep_cloze.jsonl": [{"input": "Ann met Bo.", "qa_pairs": str(cloze)}],
        "reasoning/gsm8k_test.jsonl": gsm8k,
        "reasoning/humaneval.jsonl.gz": [code | {"test": "def check(f):\n    assert f(2) == 4\n"}],
    }


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A data directory; lists are JSON Lines."""
    directory = tmp_path_factory.mktemp("data")
    for name, content in contents().items():
        text = content if isinstance(content, str) else "\n".join(map(json.dumps, content))
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return directory


def make(name, data_dir, **options):
    return tasks.make_task(name, request(data_dir=data_dir, **options))


def test_every_task_makes_documents_that_fit(data_dir):
    others = {"longbench", "longbench_e", "tpo", "coursera", "multidoc_qa", "gov_report", "humaneval"}
    for name in {*tasks.TASKS} - others | {"humaneval:run", "needle:continue", "needle:minference", "gsm8k_trace:16"}:
        task = make(name, data_dir, tokens=3000, documents=2)
        assert task.documents and task.name == name
        for document in task.documents if task.kind == "generate" and not name.startswith("longeval") else ():
            for question in document.questions:
                prompt = document.context + question.text + question.prefix
                assert len(prompt) + task.answer_tokens <= 3000, name
                assert question.answers


def test_collections_are_expanded():
    assert len(tasks.expand(("ruler",))) == 13
    names = tasks.expand(("longbench:clusterkv", "longbench:qasper", "nq"))
    assert names[:1] == ["longbench:2wikimqa"] and names[-1] == "nq" and len(names) == 9
    assert [len(tasks.expand((f"{name}",))) for name in ("longbench:all", "longbench:chelsea")] == [21, 14]
    assert [len(tasks.expand((f"longbench_e:{name}",))) for name in ("all", "balancekv")] == [13, 13]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("babi:6", "babi:6 is not a task; pass babi:1 to babi:5"),
        ("needle:pin", "needle:pin is not a task"),
        ("facts:essays", "facts:essays is not a task"),
        ("humaneval", "pass humaneval:run"),
        ("quality:2", "quality takes no argument"),
        ("niah_single_1", "task niah_single_1: tokens=260 is too small; the shortest document takes"),
        ("longdep_qa", "tokens=260 leave no evidence of a question in the texts; pass more tokens"),
        ("niah", "task 'niah' is unknown; known tasks: niah_single_1"),
        ("longbench:x", "'longbench:x' is unknown; longbench has all, clusterkv"),
    ],
)
def test_tasks_that_cannot_be_made_are_refused(data_dir, name, message):
    with pytest.raises(ValueError, match=message):
        [name] = tasks.expand((name,))
        make(name, data_dir, tokens=260, truncate=True)


def test_missing_files_are_named_with_their_source(tmp_path):
    sources = {
        "hotpotqa": "DATA_DIR/qa/hotpotqa.json from OSU-NLP-Group/HippoRAG, data/hot",
        "niah_single_2": "essays from gkamradt/LLMTest_NeedleInAHaystack",
    }
    for directory in (None, tmp_path):
        for name, message in sources.items():
            with pytest.raises(FileNotFoundError, match=message):
                make(name, directory)


def passages(document):
    found = re.findall(r"Document (\d+):\n(.+?)(?=\n\nDocument|$)", document.context, flags=re.DOTALL)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


def test_loogle_asks_what_the_cut_text_answers(data_dir):
    task = make("longdep_qa", data_dir, tokens=9000)
    [document] = task.documents  # the short text answers nothing
    assert len(document.questions) == 2
    assert task.score(" the keeper\nand more", document.questions[0]) == 1
    [document] = make("longdep_qa", data_dir, tokens=1000, truncate=True).documents
    assert [one.answers for one in document.questions] == [("The keeper.",), ("Ann",)]


def test_loogle_scores_names_of_masks(data_dir):
    task = make("shortdep_cloze", data_dir, tokens=2000)
    [question] = task.documents[0].questions
    assert task.score(" {'<mask-0>': 'Ann', '<mask-1>': 'Bob'}", question) == 0.5
    assert task.score("{'<mask-0>': 'Ann', '<mask-1>': 'Bo'}", question) == 1
    assert task.score("Ann and Bo", question) == task.score("['Ann']", question) == 0
    for braces in ("{{'<mask-0>': 'Ann'}}", "{['<mask-0>']: 'Ann'}"):  # values that cannot be hashed
        assert task.score(braces, question) == 0


def test_squad_takes_paragraphs_of_its_article_first(data_dir):
    items = questions.read_squad(data_dir)
    assert len(items) == 12
    pool = tuple(text for item in items for text in item.passages)
    document = questions.generate([items[4]], pool, np.random.default_rng(0), request(450))
    assert "Bridge 1 was built in 1901." in passages(document)
    assert all(text.startswith("Bridge") for text in passages(document))
    longer = questions.generate([items[4]], pool, np.random.default_rng(0), request(900))
    assert set(passages(document)) < set(passages(longer))
    assert longer.questions[0].answers == ("1901",) and longer.questions[0].prefix == " Answer:"


def test_documents_contain_the_passages_of_their_questions(data_dir):
    task = make("hotpotqa:2", data_dir)
    asked = [question for document in task.documents for question in document.questions]
    assert len(asked) == 6 == len({question.text for question in asked})
    for document in task.documents:
        for question in document.questions:
            [author] = question.answers
            assert f"It is by {author}. It is long." in document.context
    assert {len(item.passages) for item in questions.read_musique(data_dir)} == {2}
    assert len(questions.read_musique(data_dir)) == 3 and questions.read_musique(data_dir)[0].answers == ("A0", "B0")
    assert contains("It was IN 1901.", Question("", ("in 1901", "1902"))) == 1
    assert contains("1903", Question("", ("1901", "1902"))) == 0


def test_needles_are_at_their_depth():
    forms = {"published": "The best thing", "continue": "The best thing", "minference": "The special magic"}
    for form, said in forms.items():
        for depth in (0.0, 0.4, 1.0):
            document = needle.generate(form, np.random.default_rng(0), depth, "docs", request())
            assert abs(document.context.rindex(said) / len(document.context) - depth) < 0.15
    text = "One two. Three four. Five six."
    assert needle.insert(text, "|", 0.5) == "One two.| Three four. Five six."
    assert needle.insert(text, "|", 0) == "|" + text and needle.insert(text, "|", 1) == text + "|"


def test_the_needle_is_asked_and_scored_as_balancekv_does():
    task = tasks.make_task("needle:docs", request())
    question = task.documents[0].questions[0]
    assert question.text == (
        " </book>.\n Based on the content of the book, Question: The best thing to do in San Francisco is: \nAnswer:"
    )
    assert (task.answer_tokens, task.stop, task.chat) == (30, "\n", False)
    assert task.score("Eat a sandwich and sit in Dolores Park on a sunny day.", question) == 1
    assert task.score("you eat a sandwich", question) == 3 / 11  # "a" occurs twice and counts once


def test_longeval(data_dir):
    for name in ("lines:2", "longeval_lines:200"):
        task = make(name, data_dir)
        for document in task.documents:
            for question in document.questions:
                line = re.search(r"in line (\S+)\?", question.text)[1]
                assert f"line {line}: REGISTER_CONTENT is <{question.answers[0]}>" in document.context
    [document] = make("longeval_topics:5", data_dir).documents
    assert document.context == "USER: cats. " and document.questions[0].answers == ("Cats",)


def test_options_of_an_exam_are_parsed(data_dir):
    task = make("quality", data_dir)
    [question] = task.documents[0].questions  # the other one has two correct options
    assert question == Question("\n\nQuestion: Which?", ("1",), " Answer:", (" one", " two"))
    assert task.kind == "choose"
    questions_of = leval._choice_questions
    assert questions_of(["x\nA. p\nB. q"], ["C"]) == () and questions_of(["x\nA. p\nA. q"], ["A"]) == ()


def test_documents_whose_questions_alone_are_too_long_are_left_out():
    documents = [Document("a" * 400, (Question("b" * length, ("",)),)) for length in (50, 96, 98, 300)]
    fitting = fit_documents(documents, request(110, documents=4, truncate=True), 10)
    assert sorted(len(one.context + one.questions[0].text) for one in fitting) == [98, 98]
    with pytest.raises(ValueError, match="no document fits in tokens=110"):
        fit_documents(documents[2:], request(110, truncate=True), 10)


def test_long_documents_are_left_out_or_cut(data_dir):
    task = make("scientific_qa", data_dir)
    assert [document.name for document in task.documents] == ["0"]
    assert task.score("an old ann", task.documents[0].questions[0]) == 1  # articles and case do not count
    cut = make("scientific_qa", data_dir, truncate=True)
    assert {document.name for document in cut.documents} == {"0", "1"}
    assert all(len(document.context) < 1500 for document in cut.documents)
    assert (
        cut_middle(request().tokenizer, "abcdefgh", 4) == "abgh" and cut_middle(request().tokenizer, "abc", 4) == "abc"
    )


def test_key_value_objects_are_json(data_dir):
    task = make("kv_retrieval:2", data_dir, tokens=800)
    for document in task.documents:
        values = json.loads(document.context.split("JSON data:\n")[1])
        assert 5 < len(values) < 75 and list(values) == sorted(values, key=lambda key: int(key[4:]))
        assert len(document.questions) == 2
        for question in document.questions:
            assert values[re.search(r'Key: "(.+)"', question.text)[1]] == question.answers[0]


def test_stories_are_hidden_in_order(data_dir):
    [first, second] = records.read_stories((data_dir / "babi/qa1_single_test.txt").read_text())
    assert first == second
    assert first.facts == ("Ann went to the garden.", "Bob went home.", "Ann went out.")
    assert first.questions == ((2, "Where is Ann?", "garden"), (3, "Where is Ann?", "out"))
    document = make("babi:1", data_dir).documents[0]
    places = [document.context.index(fact) for fact in first.facts]
    assert places == sorted(places) and document.questions[0].answers == ("out",)


def test_worked_examples_and_numbers(data_dir):
    task = make("gsm8k", data_dir)
    assert "<<" not in task.documents[0].context and task.documents[0].context.count("####") > 3
    question = task.documents[0].questions[1]
    assert question.text == "Question: 1 and 1?\n" and question.answers == ("2000",)
    assert task.score("1 + 1 = 2\n#### 2,000", question) == 1


# Ten answers of every kind, with the scores of the published code.
SCORES = {
    # BABILong, babilong/metrics.py: the correct label is the only one in the first sentence.
    "babi": (functools.partial(records.only_label, records.BABI_LABELS["1"]), "Where is Ann?", "garden", {
        "garden": 1, "Garden.": 1, "the garden. Then the office.": 1, "garden, office": 0, "office": 0,
        "not the garden but the office": 0,
        "": 0, "She is out.": 0, "garden\n\nQuestion: the hallway": 0, "garden <example> kitchen": 1,
    }),
    "babi, labels of the question": (
        functools.partial(records.only_label, records.BABI_LABELS["4"]), "What is north of the bedroom?", "office",
        {"office": 1, "The office is north of the bedroom.": 1, "the bedroom": 0, "office and kitchen": 0},
    ),
    "babi, persons": (
        functools.partial(records.only_label, records.BABI_LABELS["5"]), "Who gave the milk to Fred?", "Jeff",
        {"Jeff": 1, "Jeff gave Fred the milk.": 1, "Mary": 0, "Jeff or Bill": 0, "Fred": 0},
    ),
    # LongEval, longeval/utils.py: the last number.
    "lines": (longeval.last_number, "", "12", {
        "It is <12>.": 1, "13 or 12": 1, "12 or 13": 0, "twelve": 0, "012": 1, "12.0": 0, "1 2": 0, "": 0, "-12": 1,
        "line 3: REGISTER_CONTENT is <12>": 1,
    }),
    # openai/grade-school-math: the digits after "####". In chats, our rule: the last number.
    "gsm8k": (reasoning._score_number, "", "2000", {
        "1 + 1\n#### 2000": 1, "#### 2,000": 1, "#### 2000.": 0, "#### 2000.0": 0, "2000": 0, "####2000": 0, "": 0,
        "#### 2000 eggs in 3 days": 1, "#### -2000": 0, "#### 5\n#### 2000": 0,
    }),
    "gsm8k_chat": (reasoning._score_last_number, "", "2000", {
        "1 + 1 = 2,000": 1, "The answer is $2000.": 1, "\\boxed{2000}": 1, "2000.0 eggs": 1, "2000 of 5000": 0,
        "-2000": 0, "20 00": 0, "": 0, "none": 0, "#### 2000": 1,
    }),
    # RULER, scripts/eval/synthetic/constants.py; lost-in-the-middle's key-value accuracy is the same.
    "qa": (contains, "", "New York", {
        "New York": 1, "new york city": 1, "It is NEW YORK.": 1, "York": 0, "New  York": 0, "": 0, "Paris, New York": 1,
        "newyork": 0, "New York, not Rome": 1, "NY": 0,
    }),
    # BalanceKV, run_needle_in_haystack.py: the share of the different expected words.
    "needle": (needle.share_of_words, "", "eat a sandwich and a day.", {
        "Eat a sandwich and a day.": 1, "day": 0, "day.": 0.2, "a": 0.2, "": 0, "a a a": 0.2, "EAT AND": 0.4,
        "sandwich, day.": 0.2, "eat a sandwich": 0.6, "nothing": 0,
    }),
    # L-Eval, Evaluation/auto_eval.py: rouge_score's ROUGE-L.
    "gov_report": (lambda answer, one: metrics.rouge_l_letters(answer, *one.answers), "", "The cat sat down.", {
        "The cat sat down.": 1, "the CAT sat, down": 1, "cat": 2 / 5, "down sat cat The": 2 / 8, "": 0, "dog": 0,
        "...": 0, "The cat sat down. Then it ran.": 8 / 11, "cat\nsat": 4 / 6, "the the": 2 / 6,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_answers_have_the_scores_of_the_published_code(name):
    score, text, right, answers = SCORES[name]
    found = {answer: score(answer, Question(text, (right,))) for answer in answers}
    assert found == pytest.approx(answers)


def test_code_runs_with_limits():
    question = Question("", ("def check(f):\n    assert f(2) == 4\ncheck(f)\n", "def f(x):\n"))
    assert passes_tests("    return 2 * x\n\nprint('unused')", question) == 1
    assert passes_tests("    return x", question) == 0
    assert passes_tests("    exit()", question) == 0
    assert passes_tests("    return [0] * 10**10", question) == 0  # memory


def test_every_fact_is_in_the_text_once_and_has_a_question():
    task = tasks.make_task("facts:docs", request(tokens=8000, documents=2))
    first, second = task.documents
    assert len(first.questions) == 12 and first.context != second.context
    for question in first.questions:
        assert first.context.count(f"{question.prefix.strip()} {question.answers[0]}.") == 1
    places = sorted(first.context.index(question.prefix.strip()) for question in first.questions)
    assert np.diff(places).max() < len(first.context) / 6
    code = first.questions[0]
    assert task.score(f"{code.answers[0]}.", code) == 1 and task.score(f"1{code.answers[0]}", code) == 0
    assert facts.insert("abcd", "12") == ["a", "1", "b", "c", "2", "d"]
