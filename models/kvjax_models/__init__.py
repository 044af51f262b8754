"""The Flax NNX Llama family, its checkpoints, tokenizers and generation. Knows caches only by their interface."""
