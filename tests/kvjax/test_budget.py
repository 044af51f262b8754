"""Budgets as text."""

from kvjax.budget import format_bytes


def test_readable_bytes():
    assert [format_bytes(n) for n in (10, 1536, 3 * 2**20, 5 * 2**30)] == ["10 B", "1.5 KiB", "3.0 MiB", "5.00 GiB"]
