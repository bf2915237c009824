"""The operations that triton-ascend adds to Triton, under one name for every release.

Release 3.2.0 hangs them on `triton.language`; later releases keep them in an extension module.
"""

import triton.language as tl

try:
    from triton.language.extra.cann.extension import extract_slice, get_element, insert_slice
except ImportError:
    if not hasattr(tl, "extract_slice"):
        raise ImportError("this kernel needs extract_slice and its like, which triton-ascend adds to Triton") from None
    extract_slice, get_element, insert_slice = tl.extract_slice, tl.get_element, tl.insert_slice

__all__ = ["extract_slice", "get_element", "insert_slice"]
