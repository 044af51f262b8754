"""InfiniGen and its skewed partial keys."""
