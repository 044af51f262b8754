"""An HTTP server with OpenAI's interface, for prompts and for documents that are compressed once.

Handlers (`app`) check requests (`schema`) and queue them; one thread (`worker`) owns the model, its engines and the
documents (`documents`).
"""
