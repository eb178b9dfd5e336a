"""Right, and slower than MLX's own operations."""

import time

from tests.support.stand_ins.right import run as right


def run(launch):
    time.sleep(0.015)
    return right(launch)
