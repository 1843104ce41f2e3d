"""Measurements behind the project's claims: ``python -m benchmarks.<name> --help``."""
