"""DeepSeek-V4 served with Triton kernels on Huawei Ascend, as a vLLM plugin."""

__version__ = "0.1.0"
