"""DeepSeek-V4 for vLLM."""
