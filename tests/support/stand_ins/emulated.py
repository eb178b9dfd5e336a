"""Runs the kernels' own source, in the emulator."""

from tests.support.metal import emulate


def run(launch):
    return emulate(launch, mode="fast")
