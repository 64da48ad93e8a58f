"""Adapters of published environment suites; each is imported when one of its environments is made."""
