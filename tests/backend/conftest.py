"""vLLM's environment, set before it is imported."""

from __future__ import annotations

import os

os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
