"""Recurrent cells in plain formulas, to compare with."""

import jax.numpy as jnp


def plain_core(name, params, inputs, is_first, carry, xp=jnp):
    """The equations of the cell, gate by gate and step by step."""
    gates = {"gru": 3, "lstm": 4, "min_gru": 2}[name]
    w, b = xp.split(params["input"], gates, -1), xp.split(params["bias"], gates)
    u = xp.split(params["recurrent"], gates, -1) if "recurrent" in params else None
    sigmoid = lambda x: 1 / (1 + xp.exp(-x))  # noqa: E731
    carries = []
    for x, first in zip(inputs, is_first, strict=True):
        carry = [xp.where(first[:, None], 0, m) for m in carry]
        h = carry[0]
        if name == "gru":
            r, z = (sigmoid(x @ w[i] + b[i] + h @ u[i]) for i in (0, 1))
            n = xp.tanh(x @ w[2] + b[2] + r * (h @ u[2]))
            carry = [(1 - z) * n + z * h]
        elif name == "min_gru":
            z = sigmoid(x @ w[0] + b[0])
            carry = [(1 - z) * (x @ w[1] + b[1]) + z * h]
        else:
            i, f, o = (sigmoid(x @ w[k] + b[k] + h @ u[k]) for k in range(3))
            c = f * carry[1] + i * xp.tanh(x @ w[3] + b[3] + h @ u[3])
            carry = [o * xp.tanh(c), c]
        carries.append(carry)
    return tuple(xp.stack(m) for m in zip(*carries, strict=True))
