"""The caches of the latest answers, from which further turns of their conversations continue."""

import collections
import hashlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

import kvjax
from kvjax_models.document import Document
from kvjax_models.engine import Turn


def digests(scope: str, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Returns a digest for every number of first messages of a conversation, from 0.

    Args:
        scope: only conversations of one scope continue each other.
        messages: the messages.
    """
    return [*itertools.accumulate(messages, extend_digest, initial=hashlib.sha256(scope.encode()).digest())]


def extend_digest(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """Returns the digest of a conversation with a further message."""
    return hashlib.sha256(digest + msgspec.json.encode(message, order="sorted")).digest()


class _Key(NamedTuple):
    """A document that the conversation continues, which may have been freed, and the digest of all messages."""

    document: "weakref.ref[Document] | None"
    digest: bytes


class Conversations:
    """Finished turns by their messages; those used least recently are dropped first.

    Attributes:
        held_bytes: bytes of all turns.
    """

    def __init__(self, limit: int, max_bytes: Callable[[], float]) -> None:
        """Creates an empty collection.

        Args:
            limit: maximum number of turns.
            max_bytes: returns the maximum of their bytes.
        """
        self._limit, self._max_bytes, self.held_bytes = limit, max_bytes, 0
        self._turns: collections.OrderedDict[_Key, tuple[Turn, int]] = collections.OrderedDict()  # oldest use first

    def __len__(self) -> int:
        """Returns the number of turns."""
        return len(self._turns)

    def find(self, document: Document | None, conversation: Sequence[bytes], prompt: Sequence[int]) -> Turn | None:
        """Returns the longest turn that a prompt continues.

        Args:
            document: the document that the prompt follows.
            conversation: the digests of the messages.
            prompt: the tokens of the messages; it must begin with the tokens of the turn.
        """
        for digest in conversation[-2:0:-1]:
            if (item := self._turns.get(key := _key(document, digest))) is None:
                continue
            turn = item[0]
            if len(prompt) > len(turn.tokens) and tuple(prompt[: len(turn.tokens)]) == turn.tokens:
                self._turns.move_to_end(key)
                return turn
        return None

    def add(self, document: Document | None, digest: bytes, turn: Turn) -> None:
        """Holds a turn.

        Args:
            document: the document that it follows.
            digest: the digest of its messages, with the answer.
            turn: the turn.
        """
        size = kvjax.cache_bytes((turn.state.layers, turn.state.recurrent))
        self._remove(key := _key(document, digest))
        self._turns[key] = turn, size.device + size.host
        self.held_bytes += size.device + size.host
        self.trim()

    def trim(self) -> None:
        """Drops turns beyond the limits."""
        while self._turns and (len(self) > self._limit or self.held_bytes > self._max_bytes()):
            self._remove(next(iter(self._turns)))

    def _remove(self, key: _Key) -> None:
        self.held_bytes -= self._turns.pop(key, (None, 0))[1]


def _key(document: Document | None, digest: bytes) -> _Key:
    key = _Key(None if document is None else weakref.ref(document), digest)
    hash(key)  # a weak reference cannot be hashed for the first time after its document was freed
    return key
