"""Stores of keys and values that policies are built from."""
