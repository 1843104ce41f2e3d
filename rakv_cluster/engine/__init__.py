"""One replica's loop: many requests, one forward at a time."""
