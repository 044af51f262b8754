"""ClusterGen and greedy k-center."""
