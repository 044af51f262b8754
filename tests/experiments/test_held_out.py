"""Long texts: stretches of held-out packages, and books."""

import pytest

from experiments.common import sources
from experiments.common.tasks import long_texts


class Words:
    """Words as tokens, by their hash."""

    prefix_ids = (0,)

    def encode(self, text, add_bos=True):
        return [*(self.prefix_ids if add_bos else ()), *(1 + hash(word) % 10**6 for word in text.split())]


def test_long_texts_do_not_overlap_and_follow_the_seed():
    whole = [token for name in sources.PACKAGES for token in Words().encode(sources.repository(name), add_bos=False)]
    texts = long_texts.held_out(Words(), 1001, 20, seed=0)
    begins = []
    for text in texts:
        assert len(text) == 1001 and text[0] == 0
        [begin] = [n for n in range(0, len(whole) - 999, 1000) if whole[n : n + 1000] == text[1:]]
        begins.append(begin)
    assert len(set(begins)) == 20
    assert long_texts.held_out(Words(), 1001, 5, seed=0) == texts[:5]
    assert long_texts.held_out(Words(), 1001, 5, seed=1) != texts[:5]
    with pytest.raises(ValueError, match=r"have \d stretches of 100000 tokens, not 50"):
        long_texts.held_out(Words(), 100_000, 50, seed=0)


def test_books_are_the_first_that_are_long_enough(tmp_path):
    for name, words in {"b": 5, "a": 9, "c": 8}.items():
        (tmp_path / f"{name}.txt").write_text(" ".join(f"{name}{n}" for n in range(words)))
    assert long_texts.books(tmp_path, Words(), 8, 2) == [
        Words().encode(" ".join(f"{name}{n}" for n in range(7))) for name in "ac"
    ]
    with pytest.raises(ValueError, match=r"has 2 files NAME.txt of 8 tokens or more, not 3"):
        long_texts.books(tmp_path, Words(), 8, 3)
