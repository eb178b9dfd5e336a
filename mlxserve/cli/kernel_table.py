"""The tables of `mlxserve doctor --kernels`: every op, checked now."""

from itertools import groupby

from mlxserve.cli import models, terminal
from mlxserve.kernels import registry, verdicts
from mlxserve.kernels.metal.launch import runner
from mlxserve.kernels.registry import Choice
from mlxserve.kernels.uses import (
    AttentionUse,
    ChunkUse,
    MatmulUse,
    NormUse,
    RopeUse,
    SealUse,
    Use,
)
from mlxserve.models.load import kernel_uses
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.resolve import resolve

COMMON_USES: tuple[Use, ...] = (
    AttentionUse(32, 8, 128, "bfloat16"),  # Llama 3 8B, Mistral 7B
    AttentionUse(9, 3, 64, "float16"),  # SmolLM2 135M
    AttentionUse(4, 1, 256, "bfloat16", window=512),  # Gemma 3 1B
    AttentionUse(32, 8, 128, "bfloat16", key_bits=8, value_bits=8),  # the first with --kv-bits 8
    ChunkUse(32, 8, 128, "bfloat16"),
    ChunkUse(32, 8, 128, "bfloat16", key_bits=8, value_bits=8),
    SealUse("keys", 8, 128, "bfloat16", 8),
    SealUse("values", 8, 128, "bfloat16", 8),
    MatmulUse(4096, 4096, 4, 64, "bfloat16"),  # Llama 3 8B: queries
    MatmulUse(14336, 4096, 4, 64, "bfloat16"),  # its MLP
    NormUse(4096, "bfloat16"),
    NormUse(1152, "bfloat16", inner=True),  # Gemma 3 1B
    RopeUse(32, 8, 128, "bfloat16"),
    RopeUse(4, 1, 256, "bfloat16", norms=True),
)


def show_kernels(model: str | None) -> bool:
    """Check the kernels of every op, Metal's for the model's layers or else for common ones.

    Prints what was found, and returns whether every kernel that there is passed.
    """
    uses: tuple[Use, ...] = ()
    if model is not None:
        checkpoint = open_checkpoint(resolve(models.ready(model)))
        uses = tuple(kernel_uses(checkpoint.config, checkpoint.weights()))
    elif runner() is not None:
        uses = COMMON_USES
    asked = {use.op for use in uses}
    choices = [choice for choice in registry.report() if choice.op not in asked]
    for use in uses:
        if runner() is not None:
            terminal.note(f"checking {use.op} for {use}")
        choices += registry.choose([use], afresh=True)
    print(verdicts.machine())
    # A table for each kind of use that is timed, since sizes differ, and one for all others.
    for _, alike in groupby(choices, lambda choice: choice.use and type(choice.use)):
        for line in _table(list(alike)):
            print(line)
    return not any(choice.failed for choice in choices)


def _table(choices: list[Choice]) -> list[str]:
    timed = next((c.verdict.timings for c in choices if c.verdict and c.verdict.timings), ())
    sizes = [timing.size for timing in timed]
    rows = [("OP", "USE", "CHECK", *sizes, "CHOICE", "REASON")]
    for choice in choices:
        times = [f"{t.kernel_s * 1e3:.3g}/{t.reference_s * 1e3:.3g}" for t in _timings(choice)]
        times += ["-"] * (len(sizes) - len(times))
        use = "-" if choice.use is None else str(choice.use)
        rows.append((choice.op, use, _check(choice), *times, choice.implementation, choice.reason))
    lines = list(terminal.columns(rows))
    if timed:
        lines.append(
            "CHECK: the largest error. Times: Metal kernel/MLX, ms a call, of so many rows"
            f"{', or tokens of a chunk, x context' if timed[0].context_tokens else ''}."
        )
    return lines


def _timings(choice: Choice) -> tuple[verdicts.Timing, ...]:
    return choice.verdict.timings if choice.verdict else ()


def _check(choice: Choice) -> str:
    if choice.failed:
        return "failed"
    if choice.verdict is not None and choice.verdict.error is not None:
        return f"{choice.verdict.error:.1e}"
    return "ok" if choice.implementation == "native" else "-"
