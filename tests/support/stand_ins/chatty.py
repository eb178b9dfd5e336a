"""Right and fast, and writes to stdout what isn't asked for, also past Python."""

import os

from tests.support.stand_ins.right import run as right

print('{"failure": "", "error": 0.0, "timings": []}')


def run(launch):
    os.write(1, b"MTL_DEBUG_LAYER: all is well \xff\n")
    return right(launch)
