"""The decoder: configuration, layers, rotary embedding, experts and attention over prompts."""
