"""The caches of the latest answers, from which further turns of their conversations continue."""

import collections
import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvjax_models.document import Document
from kvjax_models.prefix import Prefix


def digests(scope: str, messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Returns a digest for every number of first messages of a conversation, from 0.

    Args:
        scope: only conversations of one scope continue each other.
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
    """Finished conversations by their messages; those used least recently are dropped first.

    Attributes:
        held_bytes: bytes of all conversations.
    """

    def __init__(self, limit: int, max_bytes: Callable[[], float]) -> None:
        """Creates an empty collection.

        Args:
            limit: maximum number of conversations.
            max_bytes: returns the maximum of their bytes.
        """
        self._limit, self._max_bytes, self.held_bytes = limit, max_bytes, 0
        self._prefixes: collections.OrderedDict[_Key, Prefix] = collections.OrderedDict()  # oldest use first

    def __len__(self) -> int:
        """Returns the number of conversations."""
        return len(self._prefixes)

    def find(self, document: Document | None, conversation: Sequence[bytes], prompt: Sequence[int]) -> Prefix | None:
        """Returns the longest conversation that a prompt continues.

        Args:
            document: the document that the prompt follows.
            conversation: the digests of the messages.
            prompt: the tokens of the messages; it must begin with the tokens of the conversation.
        """
        for digest in conversation[-2:0:-1]:
            if (prefix := self._prefixes.get(key := _key(document, digest))) is None:
                continue
            if len(prompt) > len(prefix.tokens) and tuple(prompt[: len(prefix.tokens)]) == prefix.tokens:
                self._prefixes.move_to_end(key)
                return prefix if document is None else dataclasses.replace(prefix, after=document.prefix)
        return None

    def add(self, document: Document | None, digest: bytes, prefix: Prefix) -> None:
        """Holds a conversation.

        Args:
            digest: the digest of its messages, with the answer.
            prefix: its tokens with their caches.
        """
        self._remove(key := _key(document, digest))
        # Without the document, which may be deleted meanwhile.
        self._prefixes[key] = dataclasses.replace(prefix, after=None)
        self.held_bytes += prefix.held_bytes
        self.trim()

    def trim(self) -> None:
        """Drops conversations beyond the limits."""
        while self._prefixes and (len(self) > self._limit or self.held_bytes > self._max_bytes()):
            self._remove(next(iter(self._prefixes)))

    def _remove(self, key: _Key) -> None:
        if (prefix := self._prefixes.pop(key, None)) is not None:
            self.held_bytes -= prefix.held_bytes


def _key(document: Document | None, digest: bytes) -> _Key:
    key = _Key(None if document is None else weakref.ref(document), digest)
    hash(key)  # a weak reference cannot be hashed for the first time after its document was freed
    return key
