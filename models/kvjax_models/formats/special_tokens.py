"""Special tokens that a text spells out, such as `<|im_end|>`: tokens in a chat template, text in a user's message.

`escape` puts a mark into each special token of a text. The marks survive a chat template, whose special tokens have
none, and `encode` encodes special tokens with a mark as text. The tokenizers library parses all special tokens of a
text or none. `encode` therefore uses a second tokenizer of the same vocabulary, in which special tokens start with a
prefix that no text contains, and writes the prefix before those without a mark.
"""

import bisect
import functools
import itertools
import re
import secrets
from collections.abc import Iterable

import tokenizers

# A noncharacter of Unicode: a mark after the first character of a special token; two of them are the character itself.
MARK = "\ufdd0"
_MARKS = re.compile(f"{MARK}+")
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token


class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
        ids: their ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, ids: Iterable[int]) -> None:
        """Collects the spellings of special tokens.

        Args:
            backend: the tokenizer.
            ids: the special tokens; only added tokens can be spelled out.
        """
        self._backend, self._added = backend, backend.get_added_tokens_decoder()
        names = {token: self._added[token].content for token in ids if token in self._added}
        names = {token: name for token, name in names.items() if len(name) > 1}
        self.ids, self._names = frozenset(names), frozenset(names.values())
        trie = _trie_pattern(self._names) if names else "(?!)"
        self._pattern, self._start = re.compile(trie), re.compile(f"(?=(?:{trie}))(.)", re.DOTALL)
        self._first = {name[0] for name in self._names}
        self._prefixes = {name[:length] for name in self._names for length in range(1, len(name))}
        self._longest = max(map(len, self._prefixes), default=0)

    def count(self, text: str) -> int:
        """Returns how many special tokens a text spells out."""
        return len(self._pattern.findall(text))

    def escape(self, text: str, *, parse: bool = False) -> str:
        """Returns a text whose special tokens have a mark.

        A special token that begins at its end and may go on in a text after it has one, too.

        Args:
            parse: whether special tokens get no mark, because they are parsed.
        """
        text = text.replace(MARK, 2 * MARK)
        if parse:
            return text
        text = self._start.sub(rf"\1{MARK}", text)
        for start in range(max(len(text) - self._longest, 0), len(text)):
            if text[start:] in self._prefixes:
                return f"{text[: start + 1]}{MARK}{text[start + 1 :]}"
        return text

    def encode(self, text: str) -> list[int]:
        """Encodes a text: special tokens with a mark are text, and the marks are removed.

        Returns:
            The token ids.
        """
        renamed, prefix, ids = self._renamed
        return [ids.get(token, token) for token in encode(renamed, self._with_prefix(text, prefix))]

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]], str]:
        """Encodes a text as `encode` does.

        Returns:
            The token ids, start and end of the characters of every token, and the text without marks, to which these
            refer.
        """
        renamed, prefix, ids = self._renamed
        text = self._with_prefix(text, prefix)
        tokens, spans = encode_spans(renamed, text)
        places = [match.start() for match in re.finditer(prefix, text)]

        def without_prefixes(index: int) -> int:
            """Returns the index in the text without prefixes."""
            return max(index - len(prefix) * bisect.bisect_left(places, index), 0)

        spans = [(without_prefixes(start), without_prefixes(end)) for start, end in spans]
        return [ids.get(token, token) for token in tokens], spans, text.replace(prefix, "")

    def _with_prefix(self, text: str, prefix: str) -> str:
        """Returns a text without marks, with a prefix before the special tokens that had none."""
        text = self._pattern.sub(lambda match: prefix + match[0], text)
        return _MARKS.sub(self._without_mark, text)

    def _without_mark(self, match: re.Match[str]) -> str:
        """Returns what marks stand for: an odd one after the first character of a special token is no text."""
        pairs, is_odd = divmod(len(match[0]), 2)
        is_first = match.string[match.start() - 1 : match.start()] in self._first
        return MARK * (pairs + (is_odd and not is_first))

    @functools.cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, str, dict[int, int]]:
        """The tokenizer with renamed special tokens, their prefix, and the ids of added tokens by its ids."""
        renamed, prefix = tokenizers.Tokenizer(self._backend.model), secrets.token_hex(16)
        if self._backend.normalizer is not None:
            renamed.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            renamed.pre_tokenizer = self._backend.pre_tokenizer
        # New ids follow the number of tokens; these fill the holes of a vocabulary that has larger ids.
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        num_holes = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
        renamed.add_tokens([tokenizers.AddedToken(f"{prefix}{hole}", special=True) for hole in range(num_holes)])
        names = {}
        for token, added in sorted(self._added.items()):
            names[token] = (prefix if added.content in self._names else "") + added.content
            options = {name: getattr(added, name) for name in _OPTIONS}
            renamed.add_tokens([tokenizers.AddedToken(names[token], **options)])
        return renamed, prefix, {renamed.token_to_id(name): token for token, name in names.items()}


def encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Encodes a text without adding special tokens.

    Args:
        backend: the tokenizer.

    Returns:
        The token ids.
    """
    # A single text is encoded under Python's global lock, which stops all threads for seconds if the text is long.
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def encode_spans(backend: tokenizers.Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Encodes a text as `encode` does; returns the token ids, and start and end of the characters of every token."""
    encoding = backend.encode_batch([text], add_special_tokens=False)[0]
    return encoding.ids, encoding.offsets


def _trie_pattern(words: Iterable[str]) -> str:
    """Returns a regular expression that matches the longest of several words in time linear in its length."""
    branches = []
    for first, group in itertools.groupby(sorted(words), key=lambda word: word[:1]):
        rests = [word[1:] for word in group]
        branches.append(re.escape(first) + (re.escape(rests[0]) if len(rests) == 1 else _trie_pattern(rests)))
    # The empty branch of a word that others continue sorts first, and must be tried last.
    return f"(?:{'|'.join(reversed(branches))})"
