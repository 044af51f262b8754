"""Checkpoint formats: configuration, weights and tokenizer of a model from files, and back."""
