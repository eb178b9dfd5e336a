"""What we say MLX generates for a kernel is what the installed MLX generates."""

import itertools

import mlx.core as mx
import pytest

from mlxserve.kernels.metal.launch import Kernel, Launch
from tests.support.metal import emulate, generated_source, mlx_source
from tests.support.metal.signature import ATTRIBUTES

ARRAYS = {
    "many dimensions": mx.zeros((2, 3, 4)),
    "bfloat16": mx.zeros((1, 9), mx.bfloat16),
    "seven elements": mx.zeros(7, mx.int32),
    "eight elements": mx.zeros(8, mx.uint32),
    "no element": mx.zeros((0, 4), mx.float16),
    "a scalar": mx.array(3),
    "a scalar bool": mx.array(True),
}
TEMPLATES = {
    "none": (),
    "an int": (("N", 128),),
    "a negative int": (("N", -3),),
    "bools": (("A", True), ("B", False)),
    "a dtype": (("T", mx.bfloat16),),
    "all": (("T", mx.float16), ("N", 64), ("A", True), ("U", mx.uint8)),
}
SHAPES = "int n = x_shape[0] + int(x_strides[0]) + x_ndim;"


def launch(source, x, y, template=(), *, header="", dtypes=(mx.float32,)):
    outputs = tuple(f"o{i}" for i in range(len(dtypes)))
    kernel = Kernel("k", ("x", "y"), outputs, source, header)
    shapes = ((16,),) * len(dtypes)
    return Launch(kernel, (x, y), template, (64, 1, 1), (32, 1, 1), shapes, dtypes)


@pytest.mark.parametrize("name", TEMPLATES)
def test_inputs_and_templates(name):
    source = "uint i = thread_position_in_grid.x; o0[i % 16] = 0;"
    for x, y in itertools.product(ARRAYS.values(), repeat=2):
        call = launch(source, x, y, TEMPLATES[name])
        assert generated_source(call) == mlx_source(call)


@pytest.mark.parametrize("x", ARRAYS)
def test_shapes_strides_and_dimensions(x):
    for part in ("x_shape", "x_strides", "x_ndim", "y_shape x_ndim", SHAPES, "xx_shape"):
        call = launch(f"// {part}\nuint i = thread_index_in_threadgroup;", ARRAYS[x], mx.zeros(9))
        assert generated_source(call) == mlx_source(call)


@pytest.mark.parametrize("dtypes", [(mx.float16,), (mx.bool_, mx.int64, mx.bfloat16)])
def test_outputs_and_header(dtypes):
    source = f"{SHAPES} uint lane = thread_index_in_simdgroup;"
    call = launch(source, *[mx.zeros(64)] * 2, header="// x_shape\n", dtypes=dtypes)
    assert generated_source(call) == mlx_source(call)


def test_attributes():
    for name in ATTRIBUTES:
        call = launch(f"o0[0] = {name};", mx.zeros(9), mx.zeros(9))
        assert generated_source(call) == mlx_source(call)
        assert f"{name} [[{name}]]" in mlx_source(call)
    every = launch(" ".join(ATTRIBUTES), mx.zeros(9), mx.zeros(9))
    assert generated_source(every) == mlx_source(every)


def test_every_dtype():
    for dtype in (
        *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64),
        *(mx.int8, mx.int16, mx.int32, mx.int64, mx.float16, mx.bfloat16, mx.float32),
    ):
        array = mx.zeros(9, dtype)
        call = launch("grid_size", array, array, (("T", dtype),), dtypes=(dtype,))
        assert generated_source(call) == mlx_source(call)


X = mx.zeros(9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (launch("thread_index_in_simdgroup", X, mx.zeros(9, mx.complex64)), "complex64"),
        (launch("o0[0] = 1;", X, X), "no attribute"),
        (launch("grid_size", X, X, dtypes=()), "no output"),
        (Launch(Kernel("k", ("x",), ("o",), ""), (), (), (1, 1, 1), (1, 1, 1), (), ()), "0 arrays"),
    ],
)
def test_refuses_what_mlx_or_metal_would(call, message):
    with pytest.raises(ValueError, match=message):
        emulate(call)


@pytest.mark.parametrize(
    ("grid", "threadgroup", "message"),
    [
        ((64, 1, 1), (1025, 1, 1), "1024 threads"),
        ((0, 1, 1), (32, 1, 1), r"grid=\(0, 1, 1\)"),
        ((64, 1, 1), (32, 0, 1), r"threadgroup=\(32, 0, 1\)"),
    ],
)
def test_refuses_grids(grid, threadgroup, message):
    kernel = Kernel("k", (), ("o",), "o[thread_position_in_grid.x] = 1;")
    with pytest.raises(ValueError, match=message):
        emulate(Launch(kernel, (), (), grid, threadgroup, ((64,),), (mx.float32,)))


def test_refuses_more_buffers_than_metal_binds():
    names = tuple(f"x{i}" for i in range(31))
    kernel = Kernel("k", names, ("o",), "o[thread_position_in_grid.x] = 1;")
    with pytest.raises(ValueError, match="32 buffers"):
        emulate(Launch(kernel, (X,) * 31, (), (64, 1, 1), (32, 1, 1), ((64,),), (mx.float32,)))


@pytest.mark.parametrize(
    "option",
    [{"mode": "slow"}, {"order": "back"}, {"ulp_noise": -1}, {"alignment": 3}, {"timeout_s": 0}],
)
def test_refuses_options(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        emulate(launch("grid_size", X, X), **option)
