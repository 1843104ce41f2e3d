"""Public fakes for tests of code built on rakv-cluster."""
