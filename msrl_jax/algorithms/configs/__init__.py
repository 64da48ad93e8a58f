"""Configs: the fields that several algorithms share, and the checks of their values."""
