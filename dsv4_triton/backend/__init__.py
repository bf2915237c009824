"""vLLM attention backend: caches and specs, step metadata, forward, custom op, platform adapters."""
