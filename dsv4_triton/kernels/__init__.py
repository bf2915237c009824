"""Triton kernels: one public op per file, each with a reference of the same name in `dsv4_triton.reference`."""
