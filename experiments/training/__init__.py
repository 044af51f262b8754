"""What `experiments.train` is made of: the curriculum, the loss on answers, the start, and the shipped directory."""
