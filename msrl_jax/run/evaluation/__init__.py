"""The numbers of a run: rows of metrics, and evaluations."""
