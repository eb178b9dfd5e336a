"""`python -m convert`: the same as `mlxserve convert`."""

import sys

from mlxserve.cli import main

sys.argv.insert(1, "convert")
main()
