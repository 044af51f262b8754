"""Policies made of policies."""
