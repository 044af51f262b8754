"""Sharding over a mesh, collectives and host memory."""
