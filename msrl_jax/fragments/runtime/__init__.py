"""What runs: programs, instructions, functions of the host, memory, several processes."""
