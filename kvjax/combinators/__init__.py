"""Combinators: policies made of policies."""
