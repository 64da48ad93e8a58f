"""Environments that run on the host: simulators in worker processes or threads, as vector environments."""
