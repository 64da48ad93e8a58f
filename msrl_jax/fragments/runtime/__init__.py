"""Execution: programs, instructions, host functions, memory, several processes."""
