"""The passes of the compiler, from a graph to programs; `fragments/compiler.py` has their order."""
