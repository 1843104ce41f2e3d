"""Chunk stores behind one batched protocol."""
