"""Public fakes for tests of code built on rakv-cluster."""

from rakv_cluster.testing.clock import ManualClock

__all__ = ["ManualClock"]
