"""Sizes of a server."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the server.

    Attributes:
        rows: batch rows of plain prompts, or bytes for their caches.
        document_rows: questions to one document that run at a time.
        documents: documents that are asked at a time.
        max_prompt_tokens: maximum length of a prompt, or of a document's text; by default 8192 or the model's context
            length.
        max_new_tokens: maximum number of tokens after it; for documents of question and answer together.
        max_queue: maximum number of sequences that wait.
        max_prefill_steps: see `Engine`.
        stream_interval: see `Engine`.
        documents_dir: directory of saved documents; None to keep them in memory only.
        cache_bytes: maximum bytes of documents and conversations in memory; None for no limit.
        conversations: maximum number of answers whose caches further turns continue.
    """

    rows: int | str = 4
    document_rows: int = 4
    documents: int = 4
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 1024
    max_queue: int = 64
    max_prefill_steps: int = 4
    stream_interval: int = 8
    documents_dir: str | None = None
    cache_bytes: int | None = None
    conversations: int = 16
