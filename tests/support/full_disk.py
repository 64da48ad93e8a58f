"""A disk on which nothing more can be written."""

import contextlib
import resource


@contextlib.contextmanager
def no_file_above(limit):
    """The system refuses every byte of a file beyond this many, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
