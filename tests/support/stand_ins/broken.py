"""Has a compiler that refuses the source, in the words of MLX."""


def run(launch):
    raise RuntimeError(
        "[metal::Device] Unable to build metal library from source\n"
        "program_source:12:3: error: use of undeclared identifier 'simd_max'\n"
    )
