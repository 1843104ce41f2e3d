"""Drafting tokens, checking them in one forward, and deciding how many are worth it."""
