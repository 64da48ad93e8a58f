"""Environments with several agents: the protocol, and its vectorized form."""
