"""Measurements behind the project's claims: ``python -m benchmarks.<name> --help``."""

import rakv_cluster as rakv_cluster  # before torch: it says how much oneDNN may keep
