"""What a run leaves for people: summaries and figures, videos, exported policies."""
