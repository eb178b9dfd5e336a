"""The emulator runs legal kernels without a finding, and computes what they should."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal.launch import Kernel, Launch
from tests.metal.kernels import BARRIER, SHARED, launch
from tests.support.metal import KernelError, emulate, unavailable
from tests.support.metal.signature import ATTRIBUTES

pytestmark = pytest.mark.full

# Name: body, options, expected output.
X = np.arange(64, dtype=np.float32)
LEGAL = {
    "lanes that returned don't count": (
        "if (i >= 50) { o[i] = 0; return; } o[i] = simd_sum(1.0f);",
        {},
        np.repeat([32.0, 18.0, 0.0], [32, 18, 14]),
    ),
    "a simdgroup exchanges with its own barrier": (
        f"{SHARED} s[t] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); "
        "o[i] = s[(t & 32) + 31 - lane];",
        {},
        np.concatenate([X[31::-1], X[:31:-1]]),
    ),
    "a branch that whole simdgroups take": (
        "float v = x[i]; if (simdgroup == 1) v = simd_max(v); o[i] = v;",
        {},
        np.where(X < 32, X, 63),
    ),
    "a threadgroup exchanges": (
        f"{SHARED} s[t] = x[i]; {BARRIER} o[i] = s[63 - t];",
        {},
        X[::-1],
    ),
    "exchange through device memory with its fence": (
        "o[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); float v = o[63 - i]; "
        "threadgroup_barrier(mem_flags::mem_device); o[i] = v;",
        {},
        X[::-1],
    ),
    "threadgroups that don't fill the grid": (
        "o[i] = x[i % 64] + threads_per_threadgroup.x;",
        {"threads": 70, "threadgroup": 32},
        np.concatenate([X + 32, X[:6] + 6]),
    ),
    "atomics of a threadgroup": (
        "threadgroup atomic_uint n; if (t == 0) atomic_store_explicit(&n, 0, memory_order_relaxed);"
        f"{BARRIER} atomic_fetch_add_explicit(&n, t, memory_order_relaxed); {BARRIER} "
        "o[i] = float(atomic_load_explicit(&n, memory_order_relaxed));",
        {},
        np.full(64, 2016.0),
    ),
    "pointers into every space": (
        "float a[2] = {x[i], 1}; thread float* p = a; const device float* q = x + i; "
        f"{SHARED} threadgroup float* r = s + t; *r = p[1] + *q; o[i] = *r * 2;",
        {},
        2 * (X + 1),
    ),
    "vectors and swizzles": (
        "float4 v = ((const device float4*)x)[i]; half2 h = half2(v.zx); "
        "float4 w = v.wzyx; o[i] = w.x + float(h.y) + dot(float2(v.xy), float2(0, 1));",
        {"threads": 16},
        12 * np.arange(16) + 4.0,
    ),
    "structures in every space": (
        "struct S { float a; float b; }; threadgroup S s[32]; S p = ((const device S*)x)[t / 2]; "
        f"if (t % 2 == 0) s[t / 2] = p; {BARRIER} S q = s[t / 2]; o[i] = q.a + q.b;",
        {},
        4 * np.repeat(np.arange(32), 2) + 1.0,
    ),
    "a template and a method with pointers": (
        "Sum<4> a; a.clear(); a.add(x + i / 4 * 4); o[i] = first<float>(a.v) + a.v[3];",
        {
            "header": "template <int N>\nstruct Sum {\n  float v[N];\n"
            "  void clear() { for (int k = 0; k < N; k++) v[k] = 0; }\n"
            "  void add(const device float* p) { for (int k = 0; k < N; k++) v[k] += p[k]; }\n};\n"
            "template <typename T>\ninline T first(const thread T* p) { return p[0]; }\n"
        },
        np.repeat(8 * np.arange(16) + 3.0, 4),
    ),
    "a table in the header, and half literals": (
        "half a = 1.5h + half(table[i % 4]); o[i] = float(a);",
        {"header": "constant float table[4] = {1, 2, 3, 4};\n"},
        np.tile([2.5, 3.5, 4.5, 5.5], 16),
    ),
    "if constexpr": (
        "if constexpr (B) o[i] = x[i] + N; else o[i] = 0;",
        {"template": (("B", True), ("N", -5))},
        X - 5,
    ),
    "a whole number of a scalar input": ("o[i] = x + i;", {"x": mx.array(2)}, X + 2),
    "shuffles": (
        "o[i] = simd_shuffle_down(x[i], 1) + simd_shuffle_up(x[i], 1) + simd_broadcast(x[i], 5);",
        {"threads": 32, "threadgroup": 32},
        [1 + 0 + 5, *(2 * k + 5 for k in range(1, 31)), 31 + 30 + 5],
    ),
    "prefix sums and votes": (
        "o[i] = simd_prefix_exclusive_sum(x[i]) + float(simd_any(lane == 3)) + "
        "float(ulong(simd_ballot(lane < 2)));",
        {"threads": 32, "threadgroup": 32},
        [k * (k - 1) / 2 + 4 for k in range(32)],
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_runs(name):
    body, options, expected = LEGAL[name]
    call = launch(body, **options)
    for order in ("forward", "reverse", "random"):
        (out,) = emulate(call, order=order, seed=3)
        np.testing.assert_array_equal(np.array(out), np.asarray(expected, np.float32))
    (out,) = emulate(call, mode="fast")
    np.testing.assert_array_equal(np.array(out), np.asarray(expected, np.float32))


@pytest.mark.parametrize(
    "dtype",
    [mx.bool_, mx.uint8, mx.int16, mx.uint32, mx.int64, mx.float16, mx.bfloat16, mx.float32],
)
def test_every_kind_of_dtype_goes_in_and_out(dtype):
    x = mx.arange(64).reshape(2, 32).astype(dtype)
    (out,) = emulate(launch("o[i] = x[63 - i];", x, dtype=dtype, shape=(4, 16)))
    assert (out.dtype, out.shape) == (dtype, (4, 16))
    assert mx.array_equal(out.reshape(-1), x.reshape(-1)[::-1])


def test_an_input_is_made_contiguous_and_its_strides_say_so():
    x = mx.arange(64, dtype=mx.float32).reshape(4, 16).T
    (out,) = emulate(
        launch("o[i] = x[i] + 1000 * x_shape[0] + 10000 * x_strides[0] + 0 * x_ndim;", x)
    )
    assert mx.array_equal(out, x.reshape(-1) + 16 * 1000 + 4 * 10000)


def test_bfloat16_arithmetic_rounds_each_operation():
    x = (mx.arange(64) / 7).astype(mx.bfloat16)
    body = "o[i] = x[i] * x[i] + x[i];"
    (out,) = emulate(launch(body, x, dtype=mx.bfloat16))
    assert mx.array_equal(out, x * x + x)


def test_attributes():
    # A grid of 7 x 6 x 3 in threadgroups of 4 x 3 x 2: those at the far sides are smaller.
    z, y, x = np.meshgrid(*(np.arange(n) for n in (3, 6, 7)), indexing="ij")
    position = np.stack([x, y, z])
    full = np.array([4, 3, 2]).reshape(3, 1, 1, 1)
    grid = np.array([7, 6, 3]).reshape(3, 1, 1, 1)
    size = np.minimum(full, grid - position // full * full)
    within = position % full
    index = within[0] + size[0] * (within[1] + size[1] * within[2])
    threads = size.prod(axis=0)
    expected = {
        "thread_position_in_grid": position,
        "thread_position_in_threadgroup": within,
        "threadgroup_position_in_grid": position // full,
        "threads_per_threadgroup": size,
        "dispatch_threads_per_threadgroup": full,
        "threads_per_grid": grid,
        "grid_size": grid,
        "grid_origin": 0 * grid,
        "threadgroups_per_grid": -(-grid // full),
        "thread_index_in_threadgroup": index,
        "thread_index_in_simdgroup": index % 32,
        "simdgroup_index_in_threadgroup": index // 32,
        "simdgroups_per_threadgroup": -(-threads // 32),
        "dispatch_simdgroups_per_threadgroup": 1,
        "thread_index_in_quadgroup": index % 4,
        "quadgroup_index_in_threadgroup": index // 4,
        "quadgroups_per_threadgroup": -(-threads // 4),
        "dispatch_quadgroups_per_threadgroup": 6,
        "threads_per_simdgroup": 32,
        "thread_execution_width": 32,
    }
    assert expected.keys() == ATTRIBUTES.keys()
    kernel = Kernel(
        "attributes",
        (),
        tuple(f"o{i}" for i in range(len(expected))),
        "uint3 p = thread_position_in_grid; uint i = p.x + 7 * (p.y + 6 * p.z);\n"
        + "\n".join(
            f"for (int k = 0; k < 3; k++) o{n}[126 * k + i] = {name}[k];"
            if ATTRIBUTES[name] == "uint3"
            else f"o{n}[i] = {name};"
            for n, name in enumerate(expected)
        ),
    )
    shapes = tuple((3, 3, 6, 7) if ATTRIBUTES[name] == "uint3" else (3, 6, 7) for name in expected)
    dtypes = (mx.uint32,) * len(expected)
    outputs = emulate(Launch(kernel, (), (), (7, 6, 3), (4, 3, 2), shapes, dtypes))
    for name, output in zip(expected, outputs, strict=True):
        np.testing.assert_array_equal(
            np.array(output), np.broadcast_to(expected[name], output.shape), err_msg=name
        )


# Calls with a in [-0.9, 0.9] and b in [1.1, 2], and what NumPy says.
FUNCTIONS = {
    "exp(a)": lambda a, b: np.exp(a),
    "exp2(a)": lambda a, b: np.exp2(a),
    "exp10(a)": lambda a, b: 10**a,
    "log(b)": lambda a, b: np.log(b),
    "log2(b)": lambda a, b: np.log2(b),
    "log10(b)": lambda a, b: np.log10(b),
    "sqrt(b)": lambda a, b: np.sqrt(b),
    "rsqrt(b)": lambda a, b: b**-0.5,
    "sin(a)": lambda a, b: np.sin(a),
    "cos(a)": lambda a, b: np.cos(a),
    "tan(a)": lambda a, b: np.tan(a),
    "asin(a)": lambda a, b: np.arcsin(a),
    "acos(a)": lambda a, b: np.arccos(a),
    "atan(a)": lambda a, b: np.arctan(a),
    "atan2(a, b)": lambda a, b: np.arctan2(a, b),
    "sinh(a)": lambda a, b: np.sinh(a),
    "cosh(a)": lambda a, b: np.cosh(a),
    "tanh(a)": lambda a, b: np.tanh(a),
    "asinh(a)": lambda a, b: np.arcsinh(a),
    "acosh(b)": lambda a, b: np.arccosh(b),
    "atanh(a)": lambda a, b: np.arctanh(a),
    "pow(b, a)": lambda a, b: b**a,
    "powr(b, a)": lambda a, b: b**a,
    "divide(a, b)": lambda a, b: a / b,
    "fmod(b, a)": lambda a, b: np.fmod(b, a),
    "floor(a)": lambda a, b: np.floor(a),
    "ceil(a)": lambda a, b: np.ceil(a),
    "trunc(b)": lambda a, b: np.trunc(b),
    "round(a)": lambda a, b: np.copysign(np.floor(np.abs(a) + 0.5), a),
    "rint(b)": lambda a, b: np.rint(b),
    "fract(a)": lambda a, b: a - np.floor(a),
    "fabs(a)": lambda a, b: np.abs(a),
    "abs(a)": lambda a, b: np.abs(a),
    "sign(a)": lambda a, b: np.sign(a),
    "saturate(a)": lambda a, b: np.clip(a, 0, 1),
    "copysign(b, a)": lambda a, b: np.copysign(b, a),
    "step(b, a)": lambda a, b: np.zeros_like(a),
    "fmax(a, b)": lambda a, b: b,
    "fmin(a, b)": lambda a, b: a,
    "max(a, b)": lambda a, b: b,
    "min(a, b)": lambda a, b: a,
    "clamp(b, a, a)": lambda a, b: a,
    "fma(a, b, a)": lambda a, b: a * b + a,
    "mix(a, b, a)": lambda a, b: a + (b - a) * a,
    "select(a, b, a > 0)": lambda a, b: np.where(a > 0, b, a),
    "ldexp(a, 3)": lambda a, b: 8 * a,
    "metal::fast::exp(a)": lambda a, b: np.exp(a),
    "metal::precise::rsqrt(b)": lambda a, b: b**-0.5,
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float", 1e-6), ("half", 2e-3)])
def test_functions(dtype, tolerance):
    a = np.linspace(-0.9, 0.9, 64).astype(np.float16)
    b = np.linspace(1.1, 2, 64).astype(np.float16)
    body = f"{dtype} a = {dtype}(x[i]), b = {dtype}(x[64 + i]);\n"
    body += "\n".join(f"o[{64 * n} + i] = {call};" for n, call in enumerate(FUNCTIONS))
    x = mx.array(np.concatenate([a, b]))
    (out,) = emulate(launch(body, x, shape=(len(FUNCTIONS), 64)))
    for (call, function), found in zip(FUNCTIONS.items(), np.array(out), strict=True):
        expected = function(a.astype(np.float64), b.astype(np.float64))
        np.testing.assert_allclose(found, expected, tolerance, tolerance, err_msg=call)


def test_several_outputs():
    kernel = Kernel(
        "two", (), ("a", "b"), "uint i = thread_position_in_grid.x; a[i] = i; b[i] = 1;"
    )
    shapes, dtypes = ((8,), (2, 4)), (mx.int32, mx.float16)
    a, b = emulate(Launch(kernel, (), (), (8, 1, 1), (4, 1, 1), shapes, dtypes))
    assert a.tolist() == list(range(8))
    assert b.tolist() == [[1.0] * 4] * 2


def test_simdgroup_matrices():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 8, 8)).astype(np.float32)
    body = f"""simdgroup_float8x8 A, B, C = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      {SHARED} s[lane] = x[64 + lane]; s[lane + 32] = x[96 + lane]; {BARRIER}
      simdgroup_load(A, x, 8); simdgroup_load(B, s, 8, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(C, A, B, C); simdgroup_store(C, o, 8);"""
    x = mx.array(np.stack([a, b]))
    (out,) = emulate(launch(body, x, threads=32, threadgroup=32, shape=(8, 8)))
    np.testing.assert_allclose(np.array(out), a.astype(np.float64) @ b.T, atol=1e-5)


def test_lanes_hold_the_numbers_of_a_matrix_where_mlx_expects_them():
    """Its BaseMMAFrag::get_coord, of steel/gemm/mma.h."""
    body = """simdgroup_float8x8 A; simdgroup_load(A, x, 8);
      o[i * 2] = A.thread_elements()[0]; o[i * 2 + 1] = A.thread_elements()[1];"""
    (out,) = emulate(launch(body, threads=32, threadgroup=32, shape=(32, 2)))
    lane = np.arange(32)
    row = (lane // 4 & 4) + lane // 2 % 4
    column = (lane // 4 & 2) * 2 + lane % 2 * 2
    at = row * 8 + column
    np.testing.assert_array_equal(np.array(out), np.stack([at, at + 1], axis=1))


def test_order_decides_who_is_last():
    call = launch("o[0] = x[i];", shape=(1,))
    assert emulate(call, mode="fast")[0].item() == 63
    assert emulate(call, mode="fast", order="reverse")[0].item() == 0


def test_subnormals_are_flushed_to_zero_on_request():
    call = launch("o[i] = x[i] * 0.5f;", mx.full(64, 2.0**-126))
    assert emulate(call)[0][0].item() == 2.0**-127
    assert emulate(call, flush_to_zero=True)[0][0].item() == 0


def test_noise_changes_results_by_what_it_says():
    x = mx.array(np.random.default_rng(0).standard_normal(64).astype(np.float32))
    sums = launch("o[i] = simd_sum(x[i]);", x)
    assert not mx.array_equal(emulate(sums)[0], emulate(sums, reversed_reductions=True)[0])
    exact = np.exp(np.array(x, np.float64))
    (noisy,) = emulate(launch("o[i] = metal::exp(x[i]);", x), ulp_noise=4)
    assert 1e-7 < np.abs(np.array(noisy) / exact - 1).max() < 5 * 2**-23 + 1e-7
    fused = launch("o[i] = x[i] * x[i] - 1.0f;", mx.full(64, 1 + 2.0**-12))
    assert emulate(fused)[0][0].item() == 2.0**-11
    assert emulate(fused, fused_multiply_add=True)[0][0].item() == 2.0**-11 + 2.0**-24


def test_alignment_of_a_slice():
    body = "const device float4* p = (const device float4*)x; o[i] = p[i].x;"
    call = launch(body, mx.zeros(65), threads=16, threadgroup=16)
    emulate(call)
    with pytest.raises(KernelError, match="misaligned"):
        emulate(call, alignment=4)


def test_the_cache_holds_no_unfinished_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXSERVE_METAL_EMULATOR_CACHE", str(tmp_path))
    call = launch("o[i] = x[i] + 41;")
    emulate(call)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {path.suffix for path in made} >= {".so", ".txt"}
    assert not [path for path in made if path.name.startswith("building-")]
    emulate(call)
    assert made == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_without_clang_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "apt-get install clang-19" in unavailable.__wrapped__()
