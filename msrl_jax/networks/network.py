"""The interface of networks of any library."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Network(NamedTuple):
    """A network as pure functions of its parameters, from any network library."""

    init: Callable[..., Any]  # (key, *inputs) -> params
    apply: Callable[..., Any]  # (params, *inputs) -> outputs, arrays or distributions
