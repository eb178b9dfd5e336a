"""Ends the process, as an assertion in Metal's validation layer does."""

import os


def run(launch):
    os.abort()
