"""Configs: their fields, the options that a field accepts, and configs with other values."""
