"""The full cache and its store."""
