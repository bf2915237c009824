"""Device families: which chip is which, and what is said about one that is not supported."""

from __future__ import annotations

import dataclasses

import pytest

from dsv4_triton.device import (
    A2,
    A3,
    A5,
    CUDA,
    FAMILIES,
    HOST,
    Family,
    RowFormat,
    UnsupportedDeviceError,
    acting_as,
    family_of,
    family_of_soc,
)


@pytest.mark.parametrize(
    ("soc", "family"),
    [
        ("Ascend910B1", A2),
        ("Ascend910B2C", A2),
        ("ascend910b4", A2),
        ("Ascend910_9391", A3),
        ("Ascend910_9362", A3),
        ("Ascend950PR_9589", A5),
        ("Ascend910_9589", A5),  # longer prefix 910_95, not A3's 910_93
    ],
)
def test_family_of_soc(soc: str, family: Family) -> None:
    assert family_of_soc(soc) is family


@pytest.mark.parametrize("soc", ["", "Ascend310P3", "Ascend910", "Ascend910A", "H200", "910B"])
def test_unknown_chip_names_what_is_supported(soc: str) -> None:
    with pytest.raises(UnsupportedDeviceError) as error:
        family_of_soc(soc)
    message = str(error.value)
    assert repr(soc) in message
    for family in FAMILIES.values():
        for prefix in family.soc_prefixes:
            assert prefix in message


def test_longest_prefix_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the families: a prefix that contains another one is the more specific."""
    wide = dataclasses.replace(A3, name="wide", soc_prefixes=("Ascend910_9",))
    for order in ([wide, A5], [A5, wide]):
        monkeypatch.setattr("dsv4_triton.device.FAMILIES", {family.name: family for family in order})
        assert family_of_soc("Ascend910_9589") is A5
        assert family_of_soc("Ascend910_9391") is wide


def test_family_of_device_type() -> None:
    assert family_of("cpu") is HOST
    with pytest.raises(UnsupportedDeviceError, match="'cuda'"):
        family_of("cuda")
    with acting_as(CUDA):
        assert family_of("cuda") is CUDA, "for checks of kernels, not for serving"
    assert CUDA.name not in FAMILIES


def test_records_are_consistent() -> None:
    for name, family in FAMILIES.items():
        assert family.name == name
        assert family.vector_cores >= family.cube_cores >= 1
        if not family.fp8:
            assert family.index_format != "e4m3"
            assert family.row_format is RowFormat.PLAIN
    with pytest.raises(dataclasses.FrozenInstanceError):
        A2.cube_cores = 1  # type: ignore[misc]
