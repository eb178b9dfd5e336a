"""Fast, and three percent off."""

from tests.support.stand_ins.right import run as right


def run(launch):
    outs = right(launch)
    if launch.kernel.name == "pack_pages":
        codes, scales, biases = outs
        return [codes, scales * 1.03, biases]
    last = ("paged_attention_merge", "quantized_matmul")
    return [outs[0] * 1.03] if launch.kernel.name in last else outs
