"""What the installed MLX generates for a launch, obtained without Metal."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxserve.kernels.metal.launch import Launch


def mlx_source(launch: Launch) -> str:
    """The source that MLX generates for a launch, without MLX's own prelude.

    MLX prints it when a verbose kernel is recorded; exporting a function records without running.
    """
    kernel: Any = mx.fast.metal_kernel(
        name=launch.kernel.name,
        input_names=list(launch.kernel.inputs),
        output_names=list(launch.kernel.outputs),
        source=launch.kernel.source,
        header=launch.kernel.header,
    )

    def call(*arrays: mx.array):
        return kernel(
            inputs=list(arrays),
            template=list(launch.template),
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=list(launch.shapes),
            output_dtypes=list(launch.dtypes),
            verbose=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        # MLX writes to the C++ standard output, which only its file descriptor leads to.
        sys.stdout.flush()
        kept = os.dup(1)
        with printed.open("wb") as file:
            os.dup2(file.fileno(), 1)
            try:
                mx.export_function(str(Path(folder) / "f.mlxfn"), call, *launch.arrays)
            finally:
                os.dup2(kept, 1)
                os.close(kept)
        text = printed.read_text(encoding="utf-8")
    return text[text.index("```\n") + 4 : text.rindex("\n```")]
