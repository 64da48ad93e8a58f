"""The folder of a run: its files, its checkpoints, and how a run resumes."""
