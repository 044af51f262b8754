"""Chelsea and its soft matching."""
