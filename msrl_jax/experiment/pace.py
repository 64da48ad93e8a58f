"""The pace of a run: how many iterations a chunk has. A chunk takes about a second, and a run has at least about 50."""

import math

TICKS = 50
"""The approximate number of chunks of a run that takes less than a minute; every chunk ends with a tick."""

SECONDS = 1.0
"""The approximate length of a chunk of longer runs, in seconds."""


def chunk_length(iterations: int, ticks: int = TICKS) -> int:
    """The largest number of iterations of a chunk.

    It is the divisor of `iterations` that gives the number of chunks closest to `ticks`, between 2/5 and twice as many; without
    such a divisor, a length with a shorter last chunk.
    """
    if iterations <= ticks:
        return 1
    if iterations > 100_000:  # a run of this many is long, so that time decides
        return iterations // ticks
    lengths = range(math.ceil(iterations / (2 * ticks)), iterations * 5 // (2 * ticks) + 1)
    divisors = [length for length in lengths if iterations % length == 0]
    return min(divisors, key=lambda n: abs(iterations / n - ticks)) if divisors else round(iterations / ticks)


class Pace:
    """Chooses the lengths of chunks by the time that iterations take.

    Lengths are powers of two and change by factors of two, or are `most`. Chunks end at multiples of their length where they
    can, so that runs have their ticks at the same iterations.
    """

    def __init__(self, most: int, *, fixed: bool, target: float = SECONDS):
        """Starts without a measurement."""
        self.most, self._fixed, self._target = most, fixed, target
        self._length = most if fixed else 0

    @property
    def is_known(self) -> bool:
        """Whether there is a length; if not, `measured` needs the time of a first iteration."""
        return self._length > 0

    def measured(self, iterations: int, seconds: float) -> None:
        """Takes a measurement into account."""
        if self._fixed:
            return
        each = max(seconds / iterations, 1e-9)
        if self._length and self._target / 2 <= self._length * each <= 2 * self._target:
            return
        wanted = self._target / each
        if self._length:  # a single slow chunk changes little
            wanted = min(max(wanted, self._length / 2), self._length * 2)
        self._length = self.most if wanted >= self.most else 2 ** max(0, math.floor(math.log2(wanted)))

    def length(self, done: int) -> int:
        """The number of iterations of the next chunk."""
        return self._length - done % self._length
