"""Kernels for TPU and GPU. They know arrays, nothing of caches."""
