"""Benchmark cases and reports."""
