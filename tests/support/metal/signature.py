"""The function that MLX generates around a kernel's body, and what it passes to each parameter.

Source: mlx/fast.cpp and mlx/backend/metal/custom_kernel.cpp of MLX 0.32.4. A test compares the text
with what the installed MLX generates, byte for byte.
"""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlxserve.kernels.metal.launch import Launch

# Inputs with fewer elements are passed in the constant address space.
CONSTANT_BELOW = 8

TYPE_NAMES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

# A parameter for each of these that the source mentions, in this order.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

Kind = Literal["input", "shape", "strides", "ndim", "output", "attribute"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. index: of the array among the inputs or outputs, 0 for an attribute."""

    kind: Kind
    type: str
    name: str
    index: int = 0

    @property
    def by_reference(self) -> bool:
        """Whether it is passed as a reference rather than a pointer."""
        return self.type.endswith("&")

    @property
    def space(self) -> str:
        """Its address space: device, constant, or "" for a value."""
        words = self.type.split()
        return next((word for word in words if word in ("device", "constant")), "")


def function_name(launch: Launch) -> str:
    """The name of the generated function: it tells apart what is compiled separately."""
    name = "custom_kernel_" + launch.kernel.name
    if launch.template:
        values = [_template_argument(value).replace("-", "_") for _, value in launch.template]
        name += "__" + "_".join(values)
    for array in launch.arrays:
        suffix = "s" if array.ndim == 0 else "c" if array.size < CONSTANT_BELOW else ""
        name += "_" + type_name(array.dtype) + suffix
    return name + "".join("_" + type_name(dtype) for dtype in launch.dtypes)


def parameters(launch: Launch) -> list[Parameter]:
    """The parameters of the generated function, in their order."""
    found: list[Parameter] = []
    source = launch.kernel.source
    for i, (name, array) in enumerate(zip(launch.kernel.inputs, launch.arrays, strict=True)):
        space = "constant" if array.size < CONSTANT_BELOW else "device"
        mark = "*" if array.ndim else "&"
        found.append(Parameter("input", f"const {space} {type_name(array.dtype)}{mark}", name, i))
        if array.ndim:
            about: tuple[tuple[Kind, str], ...] = (
                ("shape", "int*"),
                ("strides", "int64_t*"),
                ("ndim", "int&"),
            )
            found += [
                Parameter(kind, f"const constant {declared}", f"{name}_{kind}", i)
                for kind, declared in about
                if f"{name}_{kind}" in source
            ]
    for i, (name, dtype) in enumerate(zip(launch.kernel.outputs, launch.dtypes, strict=True)):
        found.append(Parameter("output", f"device {type_name(dtype)}*", name, i))
    found += [
        Parameter("attribute", ATTRIBUTES[name], name) for name in ATTRIBUTES if name in source
    ]
    return found


def declaration(launch: Launch) -> str:
    """The generated function up to and including its opening brace."""
    text = ""
    if launch.template:
        names = ", ".join(f"{_parameter_kind(value)} {name}" for name, value in launch.template)
        text = f"template <{names}>\n"
    lines = []
    for i, parameter in enumerate(parameters(launch)):
        attribute = parameter.name if parameter.kind == "attribute" else f"buffer({i})"
        lines.append(f"  {parameter.type} {parameter.name} [[{attribute}]]")
    return text + f"[[kernel]] void {function_name(launch)}(\n" + ",\n".join(lines) + ") {\n"


def instance(launch: Launch) -> str:
    """The function's name with its template arguments."""
    values = ", ".join(_template_argument(value) for _, value in launch.template)
    return function_name(launch) + (f"<{values}>" if values else "")


def generated_source(launch: Launch) -> str:
    """The text that MLX compiles for a launch, without MLX's own prelude."""
    kernel = launch.kernel
    text = kernel.header + declaration(launch) + kernel.source + "\n}\n"
    if launch.template:
        host_name = f'[[host_name("{function_name(launch)}")]] [[kernel]]'
        text += f"\ntemplate {host_name} decltype({instance(launch)}) {instance(launch)};\n"
    return text


def type_name(dtype: mx.Dtype) -> str:
    """A dtype's name in the generated source."""
    if dtype not in TYPE_NAMES:
        raise ValueError(f"{dtype} is not a dtype of the Metal emulator")
    return TYPE_NAMES[dtype]


def _template_argument(value: int | bool | mx.Dtype) -> str:
    return type_name(value) if isinstance(value, mx.Dtype) else str(int(value))


def _parameter_kind(value: int | bool | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return "typename"
    return "bool" if isinstance(value, bool) else "int"
