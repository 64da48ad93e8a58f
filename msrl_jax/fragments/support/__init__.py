"""General helpers: messages, names and values as text, tables, tracebacks, and how JAX starts."""
