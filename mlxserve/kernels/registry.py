"""Which implementation each op uses on this device, and why. `mlxserve doctor` prints it."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Choice:
    """One op's implementation and the reason for it."""

    op: str
    implementation: str
    reason: str


def report() -> list[Choice]:
    """The choices in force on the default device."""
    if mx.metal.is_available():
        matmul = Choice("quantized_matmul", "mlx", "MLX's Metal kernels read packed weights")
    else:
        matmul = Choice(
            "quantized_matmul",
            "float32",
            "weights are dequantised at load; MLX's packed CPU matmul is about 25 times slower",
        )
    attention = Choice("paged_attention", "reference", "gather + SDPA; no native kernel yet")
    return [matmul, attention]
