"""What a run produces for people: summaries and figures, videos, exported policies."""
