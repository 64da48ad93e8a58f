"""Networks as pure functions of their parameters, and distributions over actions."""
