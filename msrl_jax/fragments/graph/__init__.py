"""From a training loop to a graph: the marker, the trace, nodes at placements."""
