"""Sizes of a server."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the server.

    Attributes:
        rows: maximum number of sequences that run at a time.
        max_prompt_tokens: maximum length of a prompt, or of a document's text; by default 8192 or the model's context
            length.
        max_new_tokens: maximum number of tokens of an answer; for documents of question and answer together.
        max_queue: maximum number of sequences that wait.
        max_prefill_tokens: see `Engine`.
        stream_interval: see `Engine`.
        documents_dir: directory of saved documents; None to keep them in memory only.
        documents_bytes: maximum bytes of that directory; None for no limit.
        cache_bytes: maximum bytes of all caches: of rows, documents and conversations; None for no limit. Rows take
            precedence over conversations.
        conversations: maximum number of answers whose caches further turns continue.
        warm_up: whether programs are compiled before the server is ready, and before a document is.
    """

    rows: int = 16
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 1024
    max_queue: int = 64
    max_prefill_tokens: int = 1024
    stream_interval: int = 1
    documents_dir: str | None = None
    documents_bytes: int | None = None
    cache_bytes: int | None = None
    conversations: int = 16
    warm_up: bool = True
