"""Networks as pure functions of their parameters, and the distributions over actions that they describe."""
