"""The decoder: configuration, layers, rotary embedding, experts and exact attention."""
