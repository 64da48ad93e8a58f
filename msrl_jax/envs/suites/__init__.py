"""Adapters of published suites of environments; each is imported when one of its environments is made."""
