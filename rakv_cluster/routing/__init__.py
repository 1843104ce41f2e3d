"""Which replica answers a request: a pure score, a view of the replicas, a thin Serve router."""
