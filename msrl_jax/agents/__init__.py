"""Agents: what an algorithm builds, functions that turn an agent into another one, optimizers and schedules."""
