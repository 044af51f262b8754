"""Model execution: prefill, decode steps, sampling, and the states and plans that they need; loops are in `engine`."""
