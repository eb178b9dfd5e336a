"""Settings that people write, read strictly."""

import pytest

from mlxserve.config import kv_bits
from mlxserve.errors import RequestError


@pytest.mark.parametrize(
    ("value", "sides"),
    [
        (16, (16, 16)),
        (8, (8, 8)),
        (4, (4, 4)),
        ("8", (8, 8)),
        ("8/4", (8, 4)),
        ("16/8", (16, 8)),
        ("4/16", (4, 16)),
    ],
)
def test_kv_bits(value, sides):
    assert kv_bits(value) == sides


@pytest.mark.parametrize(
    "value",
    [
        3,
        0,
        -8,
        True,
        False,
        8.0,
        None,
        "",
        "3",
        "/",
        "8/",
        "/8",
        "8/4/4",
        "8 / 4",
        "08",
        "8/3",
        "٨",
    ],
)
def test_kv_bits_that_there_are_none_of(value):
    with pytest.raises(RequestError, match=r"kv_bits is .*; it must be 16, 8 or 4") as error:
        kv_bits(value)
    assert repr(value) in str(error.value)
