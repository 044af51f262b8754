"""Text generation through KV caches: prefill, decoding, sampling, continuous batching and saved states."""
