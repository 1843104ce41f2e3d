"""KV tensors: shapes, buffers, encoding."""
