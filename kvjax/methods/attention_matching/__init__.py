"""Attention Matching and its regressions."""
