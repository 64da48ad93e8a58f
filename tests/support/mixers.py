"""QMIX's mixer in plain formulas, to compare with."""

import numpy as np


def plain_monotonic(params, values, state, mixing_size):
    """QMIX's mixer (arXiv 1803.11485, section 4.1, but for `h + elu(h)`) of values `[B, A]` and states `[B, S]`, in float64."""
    layers = [(np.float64(p["kernel"]), np.float64(p["bias"])) for _, p in sorted(params["params"].items(), key=_number)]
    q, s = np.float64(values), np.float64(state)

    def hyper(first, second):
        return np.maximum(s @ layers[first][0] + layers[first][1], 0) @ layers[second][0] + layers[second][1]

    # In the order of the calls; the output layer of a hypernetwork is made before its hidden layer.
    start = mixing_size**-0.5
    weights = np.abs(hyper(1, 0) + start).reshape(*q.shape, mixing_size)
    hidden = np.einsum("ba,bam->bm", q, weights) + s @ layers[2][0] + layers[2][1]
    hidden = np.where(hidden > 0, 2 * hidden, hidden + np.expm1(hidden))
    return (hidden * np.abs(hyper(4, 3) + start)).sum(-1) + hyper(6, 5)[:, 0]


def _number(item):
    return int(item[0].rpartition("_")[2])
