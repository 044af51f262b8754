"""Text generation through compressed KV caches: prefill, decoding, batching and saved states."""
