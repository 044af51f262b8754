"""Writes longbench_metrics.json: what LongBench's own scorer gives on fixed strings.

    PYTHONPATH=PATH_TO/LongBench/LongBench python tests/golden/make_longbench_golden.py

needs a checkout of https://github.com/THUDM/LongBench and `pip install jieba fuzzywuzzy python-Levenshtein rouge`.
"""

import json
import pathlib

import metrics

SOURCE = (
    "https://github.com/THUDM/LongBench, LongBench/metrics.py (MIT), with rouge 1.0.1, fuzzywuzzy 0.18.0 on "
    "python-Levenshtein, jieba 0.42.1"
)
CLASSES = [
    "Number",
    "Number of something",
    "Date",
    "Description of a person",
    "Description of something",
    "Description",
]
SCORES = {
    "qa_f1": metrics.qa_f1_score,
    "qa_f1_zh": metrics.qa_f1_zh_score,
    "rouge": metrics.rouge_score,
    "rouge_zh": metrics.rouge_zh_score,
    "classification": metrics.classification_score,
    "retrieval": metrics.retrieval_score,
    "retrieval_zh": metrics.retrieval_zh_score,
    "count": metrics.count_score,
    "code_sim": metrics.code_sim_score,
}
CASES = [
    ("qa_f1", "The quick, brown fox!", "a quick brown fox"),
    ("qa_f1", "yes", "no"),
    ("qa_f1", "", "the answer"),
    ("qa_f1", "In 1987 the Treaty of Rome was signed in Rome.", "the Treaty of Rome"),
    ("qa_f1", "an an An", "An apple an"),
    ("qa_f1_zh", "北京是中国的首都。", "中国首都北京"),
    ("qa_f1_zh", "我不知道", "上海，2010年"),
    ("qa_f1_zh", "2010 年，上海", "上海，2010年"),
    (
        "rouge",
        "The committee approved the budget. It will be sent to the board next week.",
        "The budget was approved by the committee and goes to the board.",
    ),
    ("rouge", "", "Something."),
    ("rouge", "one two three. four five", "one two three four five"),
    ("rouge", "same words here", "same words here"),
    ("rouge_zh", "会议决定下周开始新的项目。", "会议讨论了新项目，下周开始。"),
    ("rouge_zh", "。", "会议"),
    ("classification", "The type is Number of something", "Number of something"),
    ("classification", "Date or Description of a person", "Date"),
    ("classification", "Description of a person", "Description of something"),
    ("classification", "Description of a person", "Description of a person"),
    ("classification", "Number, Number of something, Date", "Number of something"),
    ("classification", "nothing known", "Date"),
    ("retrieval", "Paragraph 7", "Paragraph 7"),
    ("retrieval", "7 or 8, surely 7", "Paragraph 7"),
    ("retrieval", "none", "Paragraph 7"),
    ("retrieval", "Paragraph 17", "Paragraph 7"),
    ("retrieval_zh", "段落12", "段落12"),
    ("retrieval_zh", "第3段和段落12", "段落12"),
    ("count", "There are 12 of them, not 13", "12"),
    ("count", "twelve", "12"),
    ("code_sim", "\n\n# a comment\n    return self.value + 1\n", "    return self.values + 1"),
    ("code_sim", "```python\nx = 1\n```", "x = 1"),
    ("code_sim", "// only\n# comments", "x = 1"),
    ("code_sim", "for i in range(10):", "for j in range(100):"),
    ("code_sim", "", ""),
    ("code_sim", "    int a = b;", "int a = b;"),
]

if __name__ == "__main__":
    cases = [
        {
            "metric": name,
            "prediction": prediction,
            "answer": answer,
            "score": float(SCORES[name](prediction, answer, all_classes=CLASSES)),
        }
        for name, prediction, answer in CASES
    ]
    path = pathlib.Path(__file__).parent / "longbench_metrics.json"
    golden = {"source": SOURCE, "classes": CLASSES, "cases": cases}
    path.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
