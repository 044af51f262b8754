"""Tasks that experiments measure caches on: documents, questions and how an answer is read."""
