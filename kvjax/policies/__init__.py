"""The policies, one file per system."""
