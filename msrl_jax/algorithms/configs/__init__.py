"""Configs: fields that several algorithms share, and checks of their values."""
