"""An HTTP server with OpenAI's interface, for prompts and for documents that are compressed once.

Handlers (`app`) check requests (`schema`), queue them and answer (`reply`); one thread (`worker`) owns the model, its
engine and the documents (`documents`).
"""
