"""The packages of extras: whether they are there, and new enough."""

import importlib.metadata

INSTALL_MARL = "pip install 'msrl-jax[marl]'"


def check_version(package: str, oldest: tuple[int, int], needed_by: str, install: str) -> None:
    """Raises ImportError if a package is not installed, or too old; the message says how to install it.

    Args:
      package: its name on PyPI.
      oldest: the first two numbers of the oldest version that will do.
      needed_by: what needs it, in the plural, for the message.
      install: the command that installs it.
    """
    needed = f"{needed_by} need {package} {oldest[0]}.{oldest[1]} or later"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{needed}, which is not installed; install it with: {install}") from error
    if tuple(int(part) for part in version.split(".")[:2]) < oldest:
        raise ImportError(f"{needed}, and {version} is installed; install it with: {install}")
