"""Benchmarks and load tests: run as ``python -m loadtest.NAME`` from the repository's root."""
