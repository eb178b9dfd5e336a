"""The counted cost of kernels whose cost is known."""

import mlx.core as mx
import pytest

from tests.metal.kernels import BARRIER, launch
from tests.support.metal import KernelError, Traffic, cost

pytestmark = pytest.mark.full

N = 256
X = mx.zeros(N, mx.float32)
HALF = mx.zeros(N, mx.float16)


def loads(body, x=X, **options):
    """The loads from x of 64 threads in two simdgroups."""
    return cost(launch(body, x, **options)).buffers["x"].loads


def test_a_coalesced_copy_costs_the_least():
    counted = cost(launch("o[i] = x[i];", X, threads=N))
    once = Traffic(
        bytes=4 * N, moved_bytes=4 * N, distinct_bytes=4 * N, transactions=8, transactions_needed=8
    )
    assert counted.buffers["x"].loads == counted.buffers["o"].stores == once
    assert counted.buffers["x"].stores == counted.buffers["o"].loads == Traffic()
    assert (counted.loads().coalescing, counted.stores().redundancy) == (1, 1)
    assert counted.device_bytes == counted.device_bytes_needed == 8 * N
    assert (counted.threadgroups, counted.barriers, counted.simd_operations) == (4, 0, 0)


def test_a_stride_of_two_takes_twice_the_transactions():
    counted = cost(launch("o[i] = x[2 * i];", X))
    assert counted.buffers["x"].loads == Traffic(256, 256, 256, 4, 2)
    assert counted.buffers["x"].loads.coalescing == 2
    assert counted.buffers["o"].stores.coalescing == 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("o[i] = x[3];", Traffic(256, 8, 4, 2, 2)),  # all lanes one address
        ("o[i] = x[i / 2];", Traffic(256, 128, 128, 2, 2)),
        ("o[i] = x[63 - i];", Traffic(256, 256, 256, 2, 2)),  # order in a line costs nothing
        ("o[i] = x[i + 1];", Traffic(256, 256, 256, 4, 2)),  # across the border of lines
        ("o[i] = x[(i * 4) % 256];", Traffic(256, 256, 256, 8, 2)),
        ("o[i] = 0; if (i == 5) o[i] = x[40];", Traffic(4, 4, 4, 1, 1)),
    ],
)
def test_lines_of_a_simdgroup(body, expected):
    assert loads(body) == expected


def test_scalars_instead_of_a_vector_take_more_transactions():
    vector = loads("half2 v = ((const device half2*)x)[i]; o[i] = float(v.x) + float(v.y);", HALF)
    assert vector == Traffic(256, 256, 256, 2, 2)
    scalars = loads("o[i] = float(x[2 * i]) + float(x[2 * i + 1]);", HALF)
    assert scalars == Traffic(256, 256, 256, 4, 4)
    for body in (
        "float4 v = ((const device float4*)x)[i]; o[i] = v.x + v.y + v.z + v.w;",
        "const uint4 v = ((const device uint4*)x)[i]; o[i] = float(v.x + v.y * v.z * v.w);",
        "float4 v = float4(((const device int4*)x)[i]); o[i] = v.x + v.y;",
        "float4 v = 2.0f * ((const device float4*)x)[i]; o[i] = v.x + v.w;",
        "o[i] = dot(((const device float4*)x)[i], float4(1));",
    ):
        assert loads(body) == Traffic(1024, 1024, 1024, 8, 8)
    bfloat = loads(
        "vec<T, 4> v = ((const device vec<T, 4>*)x)[i]; o[i] = float(v.x + v.y + v.z + v.w);",
        HALF.astype(mx.bfloat16),
        template=(("T", mx.bfloat16),),
    )
    assert bfloat == Traffic(512, 512, 512, 4, 4)


def test_a_repeated_read_is_counted_again():
    body = f"float a = x[i]; {BARRIER} o[i] = a + x[63 - i];"
    assert loads(body) == Traffic(512, 512, 256, 4, 4)
    assert loads(body).redundancy == 2


def test_the_same_line_of_a_loop_is_matched_by_its_turns():
    # Lanes make 0 to 31 turns, all over the same elements.
    body = "float a = 0; for (uint k = 0; k < lane; k++) a += x[k * 32 + 1]; o[i] = a;"
    counted = loads(body, mx.zeros(31 * 32), threads=32, threadgroup=32)
    assert counted == Traffic(4 * 496, 4 * 31, 4 * 31, 31, 31)


def test_spaces_and_operations():
    body = f"""threadgroup float s[64]; s[t] = x[i % 5] + x_shape[0]; {BARRIER}
      float4 v = *(threadgroup float4*)(s + (t & 60));
      o[i] = simd_sum(v.x + v.y) + simd_max(v.z + v.w);"""
    counted = cost(launch(body, mx.zeros(5), threads=128))
    assert counted.buffers["x"].space == counted.buffers["x_shape"].space == "constant"
    assert counted.loads("constant").bytes == 128 * 8
    assert counted.loads() == Traffic()
    assert (counted.threadgroup_stored, counted.threadgroup_loaded) == (128 * 4, 128 * 16)
    assert counted.threadgroup_bytes == 256
    assert (counted.barriers, counted.simd_operations) == (2, 8)


@pytest.mark.parametrize(
    ("body", "each"),
    [
        ("o[i] = x[i];", 0),
        ("o[i] = (x[i] + 1.0f) * (x[i] - 2.0f) / 3.0f;", 4),
        ("o[i] = fma(x[i], x[i + 1], 1.0f);", 2),
        ("o[i] = metal::exp(x[i]);", 1),
        ("o[i] = simd_sum(x[i]) + simd_prefix_inclusive_sum(x[i]);", 1),
        ("float a = 0; for (uint k = 0; k < 100; k++) a += x[k] * x[k]; o[i] = a;", 200),
        ("float4 v = ((const device float4*)x)[i] * 2.0f; o[i] = v.x + v.y + v.z + v.w;", 7),
        ("half2 v = half2(half(x[i]), half(i)); v = v * v; o[i] = float(v.x + v.y);", 3),
        ("o[i] = float(bfloat(x[i]) * bfloat(2.0f));", 1),
        ("o[i] = i < 16 ? x[i] * x[i + 1] : x[i];", 0.25),
    ],
)
def test_arithmetic(body, each):
    assert cost(launch(body, X)).arithmetic == 64 * each


def test_a_wrong_kernel_has_no_cost():
    with pytest.raises(KernelError, match="device-bounds"):
        cost(launch("o[i] = x[i + 200];", X))
