"""What the service does, once for each surface, on one real cluster with a real engine and disk."""
