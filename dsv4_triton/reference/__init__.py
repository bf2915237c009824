"""Plain PyTorch references: one per kernel file, written from the maths; no Triton import."""
