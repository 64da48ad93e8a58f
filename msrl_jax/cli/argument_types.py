"""Types of arguments for `argparse`, for scripts outside the package."""

import argparse
from pathlib import Path

from msrl_jax.fragments.support.compiling import MOST_CPU_DEVICES, use_cpu_devices


def new_file(text: str) -> Path:
    """Parses the file of a figure for `argparse`; rejects a file in a missing folder before any work is done."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        fact = "is a folder; give a file in it" if path.is_dir() else f"needs the folder {path.parent}; create it first"
        raise argparse.ArgumentTypeError(f"{text} {fact}")
    return path


def positive_int(text: str) -> int:
    """Parses a number of seeds, episodes or steps for `argparse`."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text}: use an integer of at least 1")
    return int(text)


def cpu_devices(text: str) -> int:
    """Parses a number of virtual CPU devices for `argparse`, and configures JAX to start with them."""
    if positive_int(text) > MOST_CPU_DEVICES:
        raise argparse.ArgumentTypeError(f"{text}: use at most {MOST_CPU_DEVICES}")
    use_cpu_devices(int(text))
    return int(text)
