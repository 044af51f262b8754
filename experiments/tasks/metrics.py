"""Similarity of an answer to one correct answer, from 0 to 1.

Except for `rouge_l_letters`, which is L-Eval's, they equal LongBench's published scorer
(https://github.com/THUDM/LongBench, MIT), including its irregularities.
"""

import collections
import re
import string
from collections.abc import Sequence

import jieba
import rapidfuzz
import rapidfuzz.distance
import rouge

_PUNCTUATION = set(string.punctuation)
_PUNCTUATION_ZH = _PUNCTUATION | set(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def qa_f1(prediction: str, answer: str) -> float:
    """Returns the F1 of the common words, without articles, punctuation and case."""
    return _f1(_words(prediction), _words(answer))


def qa_f1_zh(prediction: str, answer: str) -> float:
    """Returns `qa_f1` of Chinese text, segmented by `jieba`."""
    return _f1(_words_zh(prediction), _words_zh(answer))


def rouge_l(prediction: str, answer: str) -> float:
    """Returns the F-measure of ROUGE-L; 0 if a text has no word, or sentences of hundreds of words.

    The package `rouge` recurses word by word, and the published scorer counts any of its errors as 0.
    """
    try:
        return rouge.Rouge().get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):  # nothing to compare, or too much
        return 0.0


def rouge_l_zh(prediction: str, answer: str) -> float:
    """Returns `rouge_l` of Chinese text, segmented by `jieba`."""
    return rouge_l(*(" ".join(jieba.cut(text)) for text in (prediction, answer)))


def rouge_l_letters(prediction: str, answer: str) -> float:
    """Returns the F-measure of ROUGE-L of words of letters and digits without case, as the package `rouge_score`."""
    predicted, right = (re.findall("[a-z0-9]+", text.lower()) for text in (prediction, answer))
    common = rapidfuzz.distance.LCSseq.similarity(predicted, right)
    return 2 * common / (len(predicted) + len(right)) if common else 0.0


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Returns 1 divided by the number of named classes if the correct one is named.

    A class whose name is part of the correct class's name does not count.
    """
    named = [name for name in classes if name in prediction]
    for name in named:  # as published: removal skips the next name
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Returns the share of correct numbers among all numbers; the answer has the form "Paragraph 7"."""
    return count(prediction, re.findall(r"Paragraph (\d+)", answer)[0])


def retrieval_zh(prediction: str, answer: str) -> float:
    """Returns the share of correct numbers among all numbers; the answer has the form "段落7"."""
    return count(prediction, re.findall(r"段落(\d+)", answer)[0])


def count(prediction: str, answer: str) -> float:
    """Returns the share of correct numbers among all numbers; 0 without numbers."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Returns the edit similarity of the first line that is neither a comment nor a fence, rounded to percent."""
    return round(rapidfuzz.fuzz.ratio(first_code_line(prediction), answer)) / 100


def first_code_line(prediction: str) -> str:
    """Returns the first line that is neither a comment nor a fence; "" without one."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def _f1(predicted: Sequence[str], right: Sequence[str]) -> float:
    same = (collections.Counter(predicted) & collections.Counter(right)).total()
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(right)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    plain = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _words_zh(text: str) -> list[str]:
    words = ("".join(letter for letter in word.lower() if letter not in _PUNCTUATION_ZH) for word in jieba.cut(text))
    return [joined for word in words if (joined := "".join(word.split()))]
