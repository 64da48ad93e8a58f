"""What this package is built with besides JAX: messages, names and values as text, tables, tracebacks, how JAX starts."""
