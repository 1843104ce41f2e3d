"""The gRPC surface's messages, and how errors and calls travel; for server and clients."""
