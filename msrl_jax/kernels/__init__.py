"""Functions with one implementation for CPUs and another for accelerators.

Different programs are fast on different platforms: a CPU needs matrix products of certain shapes and loops over steps, an
accelerator needs few kernel launches. Each function computes the same result on all platforms.
"""
