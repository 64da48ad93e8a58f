"""Training loops for replayed and recorded experience, and parts that all loops share."""
