"""Training of the shipped checkpoints: `python -m experiments.training.lines` and `.language_model`."""
