"""What experiments share: flags and what they name, rows of results, tasks."""
