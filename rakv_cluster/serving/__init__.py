"""HTTP surface and the Ray Serve deployments."""
