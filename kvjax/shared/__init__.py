"""Stores and selections that several methods use."""
