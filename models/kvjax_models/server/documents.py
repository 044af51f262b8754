"""The documents of a server: those used most recently are in memory, all are in a directory if there is one.

The caches of conversations have the memory that documents leave.

A document is written to a temporary directory, which is then renamed: a name in the directory is a complete document.
All methods but `check_text` are called in the worker's thread.
"""

import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any

import filelock
import numpy as np

from kvjax.budget import format_bytes
from kvjax_models import atomic_io
from kvjax_models.cache import CachedModel, encode_text, open_document, read_steps
from kvjax_models.citations import full_heads
from kvjax_models.document import Document
from kvjax_models.prefix import OtherModelError
from kvjax_models.runner.auto_policy import cache_options
from kvjax_models.server.conversations import Conversations
from kvjax_models.server.errors import RequestError
from kvjax_models.server.log import logger
from kvjax_models.server.schema import DocumentRequest, with_special
from kvjax_models.server.settings import Settings

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PARTIAL = ".partial-"  # start of the names of directories that are not complete, or being deleted


class Documents:
    """Documents by id.

    Attributes:
        cache: the model, with policy and budget of new documents.
    """

    def __init__(
        self,
        cache: CachedModel,
        settings: Settings,
        conversations: Conversations,
        row_bytes: Callable[[], int],
        warm_up: Callable[[Document], Iterator[None]],
        in_use: Callable[[], Collection[Document]],
    ) -> None:
        """Opens the directory of documents.

        Args:
            settings: sizes of the server, directory and limit of bytes.
            conversations: caches that make room for documents.
            row_bytes: returns the bytes that rows need.
            warm_up: compiles the programs of questions to a document, in steps.
            in_use: returns the documents of requests that are not finished.

        Raises:
            OSError: if the directory cannot be written to.
        """
        self.cache, self._settings, self._conversations = cache, settings, conversations
        self._row_bytes, self._warm_up, self._in_use = row_bytes, warm_up, in_use
        self._in_memory: collections.OrderedDict[str, Document] = collections.OrderedDict()  # oldest use first
        # Also the documents that only requests hold.
        self._alive: weakref.WeakValueDictionary[str, Document] = weakref.WeakValueDictionary()
        # Time of the last use of every document, in seconds since 1970; its directory has the same time.
        self._used: dict[str, float] = {}
        self._lock: filelock.BaseFileLock | None = None
        self._directory = None if settings.documents_dir is None else pathlib.Path(settings.documents_dir)
        if self._directory is not None:
            try:
                self._lock = atomic_io.lock_directory(self._directory)
            except OSError as error:
                raise OSError(
                    f"documents_dir={self._directory} cannot be written to: {error.strerror or error}"
                ) from error
            for path in self._directory.glob(f"{_PARTIAL}*"):  # of a process that was killed
                logger.warning("document %r was not complete and is deleted", path.name.removeprefix(_PARTIAL))
                shutil.rmtree(path, ignore_errors=True)
            saved = [path for path in self._directory.iterdir() if _ID.fullmatch(path.name) and path.is_dir()]
            self._used = {path.name: path.stat().st_mtime for path in saved}

    def close(self) -> None:
        """Lets other processes write to the directory."""
        if self._lock is not None:
            self._lock.release()

    def __len__(self) -> int:
        """Returns the number of documents in memory."""
        return len(self._in_memory)

    @property
    def held_bytes(self) -> int:
        """Bytes of the documents in memory."""
        return sum(one.prefix.held_bytes for one in [*self._in_memory.values()])

    def fixed_bytes(self, document: Document | None = None) -> int:
        """Returns the bytes of documents that must stay in memory."""
        if self._directory is None:
            return self.held_bytes
        return 0 if document is None else document.prefix.held_bytes

    def make_room(self, num_bytes: int = 0) -> None:
        """Frees memory for rows: of conversations, and of saved documents that no request holds, except the last used.

        Args:
            num_bytes: bytes of a document that is about to be read, for which the last used one is freed, too.
        """
        limit = self._settings.cache_bytes
        if limit is not None and self._directory is not None:
            in_use = self._in_use()
            names = [*self._in_memory][: None if num_bytes else -1]
            for name in [name for name in names if self._in_memory[name] not in in_use]:
                if self.held_bytes + num_bytes + self._row_bytes() <= limit:
                    break
                del self._in_memory[name]
        self._conversations.trim()

    def fits(self, name: str) -> bool:
        """Returns whether a document fits into memory next to the documents of requests; also if no request has one.

        Raises:
            RequestError: if the id is invalid.
        """
        limit, saved, in_use = self._settings.cache_bytes, self._find_saved(name), self._in_use()
        if limit is None or saved is None or not in_use or self._alive.get(name) in in_use:
            return True
        held = sum(document.prefix.held_bytes for document in in_use)
        return held + _file_bytes(saved) + self._row_bytes() <= limit

    def free_saved(self) -> None:
        """Frees the memory of all documents that are saved."""
        if self._directory is not None:
            self._in_memory.clear()

    def get(self, name: str) -> Document:
        """Returns a document, which is read from the directory if it is not in memory.

        Raises:
            RequestError: if the id is invalid or not known, the files are damaged, or of another model.
        """
        saved = self._locate(name)
        if saved is not None and name not in self._in_memory:
            if (document := self._alive.get(name)) is None:
                self.make_room(_file_bytes(saved))
                document = self._open(name, saved)
            self._insert(name, document)
        self._in_memory.move_to_end(name)
        self._used[name] = time.time()
        if saved is not None:
            with contextlib.suppress(OSError):
                os.utime(saved)
        return self._in_memory[name]

    def _open(self, name: str, saved: pathlib.Path) -> Document:
        """Reads a document from the directory; an error says why it cannot be used."""
        try:
            return open_document(self.cache.llm, saved)
        except OtherModelError as error:
            problem = f"is of another model or dtype ({error.difference}); start the server with that one"
            raise RequestError(f"document {name!r} {problem}", 409, param="document", code="other_model") from error
        except Exception as error:  # damaged files may raise anything
            logger.exception("document %s cannot be restored", name)
            problem = "cannot be restored, because its files are damaged; delete it"
            raise RequestError(
                f"document {name!r} {problem}", 409, param="document", code="document_damaged"
            ) from error

    def restore_last(self, count: int) -> Iterator[Document]:
        """Reads the documents that were used last into memory, in this order, and skips damaged ones."""
        for name in sorted(self._used, key=self._used.__getitem__)[-count:]:
            try:
                document = None if (saved := self._find_saved(name)) is None else self._open(name, saved)
            except RequestError:
                continue
            if document is not None:
                self._insert(name, document)
                yield document

    def describe(self, name: str) -> dict[str, Any]:
        """Returns the sizes of a document, of how many KV heads it keeps every token, and whether answers can cite."""
        document = self.get(name)
        generator, num_full_heads = document.prefix.generator, sum(map(len, full_heads(document.prefix)))
        return {
            "id": name,
            "object": "document",
            "tokens": document.num_tokens,
            "max_new_tokens": document.max_new_tokens,
            "bytes": document.prefix.held_bytes,
            "full_cache_bytes": document.full_cache_bytes,
            "full_heads": num_full_heads,
            "heads": sum(spec.kv_heads for spec in generator.specs),
            "can_cite": num_full_heads > 0 and generator.mesh is None,
        }

    def describe_all(self) -> list[dict[str, Any]]:
        """Returns the documents, the ones that were used last first, without reading any from the directory.

        `used` is the time in seconds since 1970, and `bytes` is the size in memory, or in the directory if the document
        is only there.
        """
        described = []
        for name in sorted(self._used, key=self._used.__getitem__, reverse=True):
            document = self._in_memory.get(name)
            if document is not None:
                size, tokens = document.prefix.held_bytes, document.num_tokens
            elif (saved := self._find_saved(name)) is not None:
                size, tokens = _file_bytes(saved), None
            else:  # its directory was removed
                continue
            values = {"used": int(self._used[name]), "bytes": size, "tokens": tokens, "in_memory": document is not None}
            described.append({"id": name, "object": "document", **values})
        return described

    def text(self, name: str) -> dict[str, Any]:
        """Returns the text of a document, to which citations refer."""
        return {"id": name, "object": "document.text", "text": self.get(name).text}

    def kept(self, name: str) -> dict[str, Any]:
        """Returns the share of the text's tokens that every KV head of every layer holds."""
        shares = np.minimum(self.get(name).kept(), 1).mean(axis=-1)
        return {"id": name, "object": "document.kept", "heads": shares.round(4).tolist()}

    def check_text(self, body: DocumentRequest) -> None:
        """Checks the length of a text; may be called in any thread."""
        llm = with_special(self.cache, body.parse_special).llm
        num_tokens = len(encode_text(llm, body.content(), None, body.chat_template_kwargs)[0])
        limit = self._settings.max_prompt_tokens
        if limit is not None and num_tokens > limit:
            raise RequestError(
                f"{num_tokens} tokens exceed max_prompt_tokens={limit}; shorten the text",
                param="text",
                code="context_length_exceeded",
            )

    def read(self, body: DocumentRequest) -> Generator[dict[str, Any] | None]:
        """Compresses a text in steps, and saves the document.

        If it is closed before the last step, no document without an id of the client remains.

        Args:
            body: the text, which `check_text` has checked; its id cannot be guessed if it names none. With
                `full_cache`, a second document, whose id ends with "-full", holds the text in a full cache.

        Yields:
            None after every step, finally the sizes of the document.

        Raises:
            RequestError: if the id is invalid or taken, or a document does not fit or cannot be saved, which leaves
                none.
        """
        start = time.monotonic()
        name = f"doc_{secrets.token_urlsafe(24)}" if body.id is None else body.id
        names, caches = [name], [with_special(self.cache, body.parse_special)]
        if body.full_cache:
            names.append(f"{name}-full")
            policy, budget, heads = cache_options("exact", None, None)
            if self.cache.policy == policy:
                raise RequestError("the policy of this server is a full cache; leave it out", param="full_cache")
            caches.append(dataclasses.replace(caches[0], policy=policy, budget=budget, heads=heads, kv_dtype=None))
        for one in names:
            if self._find_saved(one) is not None or one in self._in_memory:
                raise RequestError(f"document {one!r} exists; delete it first", 409, param="id", code="document_exists")
        documents: Sequence[Document] = ()
        options: Any = {
            "max_new_tokens": self._settings.max_new_tokens,
            "template_options": body.chat_template_kwargs,
        }
        for result in read_steps(caches, body.content(), **options):
            if result is None:
                yield None
            else:
                documents = [one.with_tokenizer(self.cache.llm.tokenizer) for one in result]
        try:
            for one, document in zip(names, documents, strict=True):
                self._check_bytes(document)
                if self._directory is not None:
                    self._save(document, self._directory / one)
                self._insert(one, document)
                self._used[one] = time.time()
        except RequestError:
            self._discard(names)
            raise
        try:
            for document in documents:
                yield from self._warm_up(document)
        except (
            BaseException
        ):  # a GeneratorExit if the client has gone, which does not know an id that it did not choose
            if body.id is None:
                self._discard(names)
            raise
        described = self.describe(name) | {"seconds": round(time.monotonic() - start, 3)}
        yield described | ({"full_cache": names[1]} if body.full_cache else {})

    def _discard(self, names: Sequence[str]) -> None:
        """Deletes documents that may exist."""
        for name in names:
            with contextlib.suppress(RequestError):
                self.delete(name)

    def delete(self, name: str) -> dict[str, Any]:
        """Deletes a document; requests that use it go on.

        Returns:
            A confirmation.
        """
        if (saved := self._locate(name)) is not None:
            partial = saved.with_name(f"{_PARTIAL}{name}")
            shutil.rmtree(partial, ignore_errors=True)
            saved.rename(partial)
            shutil.rmtree(partial, ignore_errors=True)
        self._in_memory.pop(name, None)
        self._alive.pop(name, None)
        self._used.pop(name, None)
        return {"id": name, "object": "document", "deleted": True}

    def _locate(self, name: str) -> pathlib.Path | None:
        """Returns the directory of a document, None if it is in memory only; refuses ids that are not known."""
        saved = self._find_saved(name)
        if saved is None and name not in self._in_memory:
            raise RequestError(f"document {name!r} does not exist", 404, param="document", code="document_not_found")
        return saved

    def _find_saved(self, name: str) -> pathlib.Path | None:
        """Returns the directory of a document, if it is saved; refuses invalid ids."""
        if not _ID.fullmatch(name):
            raise RequestError("an id of a document has 1 to 64 letters, digits, - and _", param="id")
        if self._directory is None:
            return None
        path = self._directory / name
        if path.is_symlink():
            raise RequestError(f"{name!r} is a symbolic link, not a document", param="id")
        return path if path.is_dir() else None

    def _check_bytes(self, document: Document) -> None:
        """Checks that a document fits, if the others stay or can be read again."""
        limit, needed = self._settings.cache_bytes, document.prefix.held_bytes
        held = self.fixed_bytes() + (self._row_bytes() if self._directory is None else 0)
        if limit is not None and held + needed > limit:
            raise RequestError(
                f"the document takes {format_bytes(needed)}, and other documents and rows {format_bytes(held)}, of "
                f"cache_bytes={format_bytes(limit)}; delete others, or shorten the text",
                507,
                code="documents_full",
            )

    def _insert(self, name: str, document: Document) -> None:
        """Holds a document in memory; the ones used least recently are in the directory only."""
        self._in_memory[name] = self._alive[name] = document
        self.make_room()

    def _save(self, document: Document, path: pathlib.Path) -> None:
        """Writes a document; a failure leaves nothing."""
        partial = path.with_name(f"{_PARTIAL}{path.name}")
        try:
            document.save(partial)
            self._check_directory()
            os.rename(partial, path)
            atomic_io.fsync(path.parent)
        except Exception as error:  # also of orbax, for a full disk
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, RequestError):
                raise
            logger.exception("document %s cannot be saved", path.name)
            raise RequestError("the document could not be saved; the server's log has the reason", 507) from error

    def _check_directory(self) -> None:
        """Checks that all files fit into the directory."""
        limit = self._settings.documents_bytes
        if limit is not None and self._directory is not None and (size := _file_bytes(self._directory)) > limit:
            raise RequestError(
                f"the documents would take {format_bytes(size)}, more than documents_bytes={format_bytes(limit)}; "
                "delete others",
                507,
                code="documents_full",
            )


def _file_bytes(path: pathlib.Path) -> int:
    """Returns the bytes of the files in a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
