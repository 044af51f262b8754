"""Policies that rank the prompt's tokens by a score, with their base class and store."""
