"""Agents that have this folder on their path take a driver to be loaded."""

import os
import pathlib

if "DEADPOOL_NODE" in os.environ:
    exists = pathlib.Path.exists

    def exists_or_is_the_driver(path, **options):
        return str(path) == "/dev/nvidiactl" or exists(path, **options)

    pathlib.Path.exists = exists_or_is_the_driver
