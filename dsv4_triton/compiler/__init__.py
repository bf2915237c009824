"""Triton source to something that runs or can be judged."""
