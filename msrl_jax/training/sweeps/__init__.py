"""Sweeps: many settings of a config, several at once in each program."""
