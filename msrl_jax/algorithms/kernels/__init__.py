"""What is computed one way on CPUs and another way on accelerators, behind plain functions.

XLA's CPU compiler and its compilers for accelerators are fast for other programs: a CPU wants products of certain shapes and
loops over steps, an accelerator wants few launches. Each function computes the same mathematics on all platforms.
"""
