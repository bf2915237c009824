"""DeepSeek-V4 with Triton kernels for Huawei Ascend, as a vLLM plugin."""

__version__ = "0.1.0"
