"""The argument checks that every launcher shares."""

from __future__ import annotations

import pytest
import torch

from dsv4_triton.kernels._checks import check_filled, check_tensor, output


def check(tensor, shape=(2, 3, 4), dtype=torch.float32, **options) -> None:
    check_tensor("op", "x", tensor, shape, dtype, **options)


def test_accepts_what_fits() -> None:
    check(torch.zeros(2, 3, 4), device=torch.device("cpu"))
    check(torch.zeros(2, 3, 4), (None, 3, None), (torch.bfloat16, torch.float32))
    check(torch.zeros(0, 3, 4).transpose(1, 2), (0, 4, 3))


def test_layouts() -> None:
    pages = torch.zeros(2, 20)[:, :12].unflatten(1, (3, 4))
    rows = torch.zeros(2, 3, 8)[..., :4]
    check(pages, layout="page")
    check(pages, layout="rows")
    check(rows, layout="rows")
    check(torch.zeros(1, 20)[:, :12].unflatten(1, (3, 4)), (1, 3, 4))
    for tensor, layout, axis in ((pages, "contiguous", 0), (rows, "page", 1), (rows.transpose(1, 2), "rows", 2)):
        with pytest.raises(ValueError, match=f"axis {axis} must have stride"):
            check(tensor, tensor.shape, layout=layout)


@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        ([1.0], TypeError, "op: x must be a torch.Tensor, got list"),
        (torch.zeros(2, 3, 4).half(), TypeError, "op: x has dtype torch.float16, expected torch.float32"),
        (torch.zeros(2, 3), ValueError, r"op: x has shape \(2, 3\), expected \(2, any, 4\)"),
        (torch.zeros(2, 3, 5), ValueError, r"op: x has shape \(2, 3, 5\), expected \(2, any, 4\)"),
        (torch.zeros(2, 3, 4, device="meta"), ValueError, "op: x is on meta, expected cpu"),
    ],
)
def test_names_what_does_not_fit(tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check(tensor, (2, None, 4), device=torch.device("cpu"))


def test_output_is_checked_or_made() -> None:
    given = torch.zeros(2, 3)
    assert output("op", "out", given, (2, 3), torch.float32, given.device) is given
    made = output("op", "out", None, (2, 3), torch.int32, given.device)
    assert made.shape == (2, 3) and made.dtype == torch.int32
    with pytest.raises(ValueError, match="out has shape"):
        output("op", "out", given, (3, 2), torch.float32, given.device)


def test_refuses_what_is_read_whatever_the_indices_say() -> None:
    check_filled("op", cache=torch.zeros(1, 4, 8), table=None)
    for empty in (torch.zeros(0, 4, 8), torch.zeros(3, 0, 8)):
        with pytest.raises(ValueError, match=r"op: cache has shape .*, expected at least one row"):
            check_filled("op", table=torch.zeros(1), cache=empty)
