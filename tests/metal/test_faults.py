"""The emulator finds each kind of fault in a kernel, and says where it is."""

import mlx.core as mx
import pytest

from tests.metal.kernels import BARRIER, NAME_LINES, SHARED, launch
from tests.support.metal import KernelError, emulate

pytestmark = pytest.mark.full

AT = """
__attribute__((noinline)) float at(const threadgroup float* p, int k) { return p[k]; }
"""

# Name: kind of the finding, body, options of `launch`.
FAULTS = {
    "no barrier": ("threadgroup-race", f"{SHARED} s[t] = x[i];\no[i] = s[63 - t];", {}),
    "no barrier before the next write": (
        "threadgroup-race",
        f"{SHARED} float a = 0; for (int k = 0; k < 3; k++) "
        f"{{ s[t] = x[i] * k; {BARRIER} a += s[63 - t]; }} o[i] = a;",
        {},
    ),
    "the wrong fence": (
        "threadgroup-race",
        f"{SHARED} s[t] = x[i]; threadgroup_barrier(mem_flags::mem_device); o[i] = s[63 - t];",
        {},
    ),
    "a simdgroup's lanes exchange without a barrier": (
        "threadgroup-race",
        f"{SHARED} s[lane] = x[i]; o[i] = s[31 - lane];",
        {"threads": 32, "threadgroup": 32},
    ),
    "simdgroups exchange with a simdgroup's barrier": (
        "threadgroup-race",
        f"{SHARED} s[t] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[63 - t];",
        {},
    ),
    "exchange through device memory without its fence": (
        "device-race",
        f"o[i] = x[i]; {BARRIER} float v = o[63 - i]; threadgroup_barrier(mem_flags::mem_device); "
        "o[i] = v;",
        {},
    ),
    "two threadgroups write an element": (
        "device-race",
        "o[i % 64] = x[i % 64];",
        {"threads": 128, "shape": (64,)},
    ),
    "a threadgroup reads what another wrote": (
        "device-race",
        "o[i] = i < 64 ? x[i] : o[i - 64];",
        {"threads": 128},
    ),
    "write behind the end": ("device-bounds", "o[i + 1] = x[i];", {}),
    "read behind the end": ("device-bounds", "o[i] = x[i + 1];", {}),
    "an index below zero": ("device-bounds", "o[i] = x[i - 1];", {}),
    "far behind the end": ("device-bounds", "o[i] = x[i * 100000];", {}),
    "read behind a small input": (
        "device-bounds",
        "o[i] = x[i];",
        {"x": mx.zeros(5), "threads": 6},
    ),
    "write to an input": ("read-only", "((device float*)x)[i] = 1; o[i] = 1;", {}),
    "threadgroup memory that nothing wrote": (
        "uninitialised-read",
        f"{SHARED} if (t < 63) s[t] = x[i]; {BARRIER} o[i] = s[t];",
        {},
    ),
    "a sum onto an output that nothing wrote": ("uninitialised-read", "o[i] += x[i];", {}),
    "an atomic sum onto an output that nothing wrote": (
        "uninitialised-read",
        "atomic_fetch_add_explicit((device atomic<float>*)o + i, x[i], memory_order_relaxed);",
        {},
    ),
    "an element that nothing writes": ("unwritten-output", "if (i < 60) o[i] = x[i];", {}),
    "threads at a barrier and past it": (
        "barrier-divergence",
        f"o[i] = x[i]; if (t < 32) {BARRIER}",
        {},
    ),
    "a return before a barrier": (
        "barrier-divergence",
        f"if (i >= 60) {{ o[i] = 0; return; }} {BARRIER} o[i] = x[i];",
        {},
    ),
    "two different barriers": (
        "barrier-divergence",
        f"if (t < 32) {{\n{BARRIER} }} else {{\n{BARRIER} }}\no[i] = x[i];",
        {},
    ),
    "two different simd operations": (
        "simd-divergence",
        "float v = x[i]; if (lane < 16)\nv = simd_sum(v);\nelse\nv = simd_sum(v * 2);\no[i] = v;",
        {},
    ),
    "a simd operation of half the lanes": (
        "simd-divergence",
        "float v = 0; if (lane < 8) v = simd_sum(1.0f); o[i] = v + simd_sum(1.0f);",
        {},
    ),
    "a simd operation and a barrier": (
        "simd-divergence",
        f"float v = x[i]; if (lane < 16) v = simd_sum(v); else {BARRIER} o[i] = v;",
        {},
    ),
    "a shuffle from a lane that returned": (
        "inactive-lane",
        "if (lane > 20) { o[i] = 0; return; } o[i] = simd_shuffle(x[i], 31 - lane);",
        {},
    ),
    "a shuffle's mask differs between lanes": (
        "simd-argument",
        "o[i] = simd_shuffle_xor(x[i], lane & 1);",
        {},
    ),
    "a simdgroup matrix in part of a simdgroup": (
        "partial-simdgroup",
        "simdgroup_float8x8 m; simdgroup_load(m, x, 8); o[i] = m.thread_elements()[0];",
        {"threads": 24, "threadgroup": 24},
    ),
    "an index of a threadgroup array": (
        "array-bounds",
        f"threadgroup float s[32]; s[t] = x[i]; {BARRIER} o[i] = s[t];",
        {},
    ),
    "a pointer into a threadgroup array": (
        "object-bounds",
        "threadgroup float a[32]; threadgroup float b[32]; threadgroup float* p = a + t; "
        f"b[lane] = 0; p[0] = x[i]; {BARRIER} o[i] = p[0];",
        {},
    ),
    "an index of a private array": (
        "array-bounds",
        "float a[4]; for (int k = 0; k < 4; k++) a[k] = x[k]; o[i] = a[i & 7];",
        {},
    ),
    "a pointer into a private array": (
        "object-bounds",
        "float a[4]; thread float* p = a; for (int k = 0; k < 4; k++) p[k] = x[k]; p += t & 7; "
        "o[i] = *p;",
        {},
    ),
    "a pointer between threadgroup arrays": (
        "threadgroup-bounds",
        "threadgroup float a[32]; threadgroup float b[32]; b[lane] = 0; a[lane] = x[i];\n"
        "o[i] = at(a, 33);",
        {"header": AT, "threads": 32, "threadgroup": 32},
    ),
    "another thread's private memory": (
        "foreign-private",
        f"threadgroup ulong s[1]; float a[2] = {{x[i], x[1]}}; thread float* p = a; "
        f"if (t == 0) s[0] = ulong(p); {BARRIER} o[i] = *(thread float*)s[0] + p[lane % 2];",
        {},
    ),
    "a bool that is neither": (
        "invalid-value",
        "o[i] = ((const device bool*)x)[i] ? 1 : 2;",
        {"x": mx.full(64, 7, mx.uint8)},
    ),
    "too much private memory": (
        "private-memory",
        "float a[100000]; for (int k = 0; k < 100000; k++) a[k] = x[k & 31]; float s = 0; "
        "for (int k = 0; k < 100000; k++) s += a[(k * 7919) % 100000]; o[i] = s;",
        {},
    ),
    "too much threadgroup memory": (
        "threadgroup-memory",
        "threadgroup float s[8193]; s[t] = x[i]; o[i] = s[t];",
        {},
    ),
    "division by zero": ("integer-division", "int d = int(x[0]); o[i] = float(int(i) / d);", {}),
    "an integer overflows": (
        "integer-overflow",
        "int v = int(x[63]) << 24; o[i] = float(v + v + v);",
        {},
    ),
    "a shift by the width": ("shift", "uint v = uint(x[i]); o[i] = float(v << (t + 1));", {}),
    "a float too large for an int": ("float-cast", "o[i] = float(int(x[i] * 1e10f));", {}),
    "a vector at a scalar's address": (
        "misaligned",
        "const device float4* p = (const device float4*)(x + 1); o[i] = p[0].x;",
        {},
    ),
    "a loop without an end": (
        "timeout",
        "uint n = uint(x[0]); while (n < 1) { if (x[1] < 0) n++; } o[i] = n;",
        {},
    ),
}

# What a compiler refuses, ours or Metal's. Name: part of the message, body, options of `launch`.
REFUSED = {
    "a bfloat from a float": (
        "no viable conversion from 'float' to 'bfloat'",
        "T v = x[i] + 1.0f; o[i] = v;",
        {"template": (("T", mx.bfloat16),)},
    ),
    "an atomic of half": (
        "Metal has atomic<T> of int",
        "atomic_fetch_add_explicit((device atomic<half>*)o + i, half(1), memory_order_relaxed);",
        {"dtype": mx.float16},
    ),
    "double": ("poisoned", "double v = x[i]; o[i] = v;", {}),
    "the C++ library": ("poisoned", "o[i] = std::max(x[i], 0.f);", {}),
    "max of an int and a float": (
        "no matching function for call to 'max'",
        "o[i] = metal::max(int(i), x[i]);",
        {},
    ),
    "a half4 from a float4": (
        "cannot initialize a variable of type 'half4'",
        "half4 h = float4(x[i]); o[i] = h.x;",
        {},
    ),
    "an assignment to an input": ("not assignable", "x[i] = 1; o[i] = 0;", {}),
    "an array of variable length": (
        "variable length",
        "float a[t + 1]; a[0] = x[i]; o[i] = a[0];",
        {},
    ),
    "a simd operation of ulong": (
        "no matching function for call to 'simd_sum'",
        "o[i] = simd_sum(ulong(i));",
        {},
    ),
    "a scalar input as an array": (
        "subscripted value is not",
        "o[i] = x[i];",
        {"x": mx.array(1.0)},
    ),
    "a cast of a small input to device": (
        "x is in the constant space here, cast to device",
        "const device float2* p = (const device float2*)(x + 2); o[i] = p[0].x;",
        {"x": mx.zeros(6)},
    ),
    "a pointer without a space": ("float without a space", "const float* p = x; o[i] = p[i];", {}),
    "a private pointer without a space": (
        "float without a space",
        "float a = x[i]; float* p = &a; o[i] = *p;",
        {},
    ),
    "a private reference without a space": (
        "auto without a space",
        "float a = x[i]; auto& r = a; o[i] = r;",
        {},
    ),
    "a parameter without a space": (
        "float without a space",
        "float a[2] = {x[i], 1}; o[i] = f(a);",
        {"header": "struct S { float a; };\ninline float f(const float* p) { return p[0]; }\n"},
    ),
    "a device pointer as a thread's": (
        "__global",
        "o[i] = f(x);",
        {"header": "inline float f(const thread float* p) { return p[0]; }\n"},
    ),
    "a threadgroup pointer as a device one": (
        "__local",
        f"{SHARED} s[t] = x[i]; o[i] = f(s + t);",
        {"header": "inline float f(const device float* p) { return p[0]; }\n"},
    ),
    "a small input, which is constant, as a device one": (
        "__constant",
        "o[i] = f(x);",
        {"header": "inline float f(const device float* p) { return p[0]; }\n", "x": mx.zeros(7)},
    ),
    "a threadgroup variable in a function": (
        "outside of the kernel body",
        "o[i] = f(x[i]);",
        {"header": "inline float f(float v) { threadgroup float s[1]; s[0] = v; return s[0]; }\n"},
    ),
    "a structured binding": (
        "C++17",
        "struct P { float a, b; }; P p = {x[i], 1}; auto [a, b] = p; o[i] = a + b;",
        {},
    ),
    "perhaps uninitialised": ("uninitialized", "float v; if (i > 3) v = x[i]; o[i] = v;", {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_finds(name):
    kind, body, options = FAULTS[name]
    with pytest.raises(KernelError) as caught:
        emulate(launch(body, **options), timeout_s=2 if kind == "timeout" else 60)
    assert kind in caught.value.kinds, caught.value


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    message, body, options = REFUSED[name]
    with pytest.raises(KernelError) as caught:
        emulate(launch(body, **options))
    assert caught.value.kinds == {"compile"}
    assert message in str(caught.value)


def test_a_finding_says_where():
    with pytest.raises(KernelError) as caught:
        emulate(launch(f"{SHARED}\ns[t] = x[i];\no[i] = t < 32 ? 0.0f : s[t - 32];"))
    finding = next(f for f in caught.value.findings if f.kind == "threadgroup-race")
    assert finding.where == f"k.source:{NAME_LINES + 3}"
    assert finding.code == "o[i] = t < 32 ? 0.0f : s[t - 32];"
    assert finding.other == f"k.source:{NAME_LINES + 2}"
    assert (finding.threadgroup, finding.thread) == ((0, 0, 0), (32, 0, 0))
    assert str(finding) in str(caught.value)


def test_a_finding_in_a_header_says_where():
    header = "\ninline float f(const device float* p, uint i) {\n  return p[i + 1];\n}\n"
    with pytest.raises(KernelError, match=r"k\.header:3: return p\[i \+ 1\];"):
        emulate(launch("o[i] = f(x, i);", header=header))
