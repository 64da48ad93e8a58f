"""What training loops share: acting, updates, and the loops over replayed and recorded experience."""
