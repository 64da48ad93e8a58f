"""Algorithms by name or file: how they are found, checked, built and copied."""
