"""ClusterKV, its variant with a residual, and their base class."""
