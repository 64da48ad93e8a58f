"""Training loops for off-policy and offline RL, and helpers that all loops share."""
