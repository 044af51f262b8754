"""SubGen, its variant with means, and their stream structures."""
