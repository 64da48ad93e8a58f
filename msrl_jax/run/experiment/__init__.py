"""What a run computes: the experiment, its members and populations, and its plain data."""
