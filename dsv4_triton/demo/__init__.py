"""The demo: a small random DeepSeek-V4 checkpoint, and a server that answers from it."""
