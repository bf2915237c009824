"""Benchmarks, each beside a baseline in the same run."""
