"""What the training runs are made of: data, losses, starts, checkpoints, and what is shipped."""
