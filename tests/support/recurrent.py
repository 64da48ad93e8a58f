"""Recurrent layers in plain formulas, to compare with."""

import jax.numpy as jnp
import numpy as np


def plain_core(name, params, inputs, is_first, carry, xp=jnp):
    """Outputs and carries by the equations of the layer, gate by gate and step by step."""
    if name == "lru":
        return plain_lru(params, inputs, is_first, carry, xp)
    if name.startswith("gtrxl"):
        return plain_gtrxl(params, inputs, is_first, carry, xp)
    gates = {"gru": 3, "lstm": 4, "min_gru": 2}[name]
    w, b = xp.split(params["input"], gates, -1), xp.split(params["bias"], gates)
    u = xp.split(params["recurrent"], gates, -1) if "recurrent" in params else None
    sigmoid = lambda x: 1 / (1 + xp.exp(-x))
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
    carries = tuple(xp.stack(m) for m in zip(*carries, strict=True))
    return carries[0], carries


def plain_lru(params, inputs, is_first, carry, xp):
    """Real and imaginary parts one by one; the tanh formula of GELU."""
    fade, turn = xp.exp(-xp.exp(params["log_rate"])), xp.exp(params["log_phase"])
    real, imaginary = carry
    outputs, carries = [], []
    for x, first in zip(inputs, is_first, strict=True):
        real, imaginary = (xp.where(first[:, None], 0, h) for h in (real, imaginary))
        written = xp.split(x @ params["input"], 2, -1)
        real, imaginary = (
            fade * (xp.cos(turn) * real - xp.sin(turn) * imaginary) + written[0] * xp.exp(params["log_gain"]),
            fade * (xp.sin(turn) * real + xp.cos(turn) * imaginary) + written[1] * xp.exp(params["log_gain"]),
        )
        y = xp.concatenate([real, imaginary], -1) @ params["output"]
        y = 0.5 * y * (1 + xp.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        outputs.append(y / (1 + xp.exp(-(y @ params["gate"]))) + x @ params["skip"])
        carries.append((real, imaginary))
    return xp.stack(outputs), tuple(map(xp.stack, zip(*carries, strict=True)))


def plain_gtrxl(params, inputs, is_first, carry, xp, heads=2):
    """Every environment by itself with a list of the steps that it remembers; every head and every key one by one."""
    memory, known = carry
    num_layers, context, size = memory.shape[1:]
    width = size // heads
    sigmoid = lambda x: 1 / (1 + xp.exp(-x))
    angles = lambda d: d * np.exp(-np.log(1e4) * np.arange(0, size, 2) / size)
    wave = lambda d: np.concatenate([np.sin(angles(d)), np.cos(angles(d))])

    def norm(x, layer, i):
        return (x - x.mean()) / xp.sqrt(((x - x.mean()) ** 2).mean() + 1e-6) * layer["scales"][i] + layer["shifts"][i]

    def gate(p, x, y):
        new, old = xp.split(y @ p["new"], 3), xp.split(p["old"], 3, -1)
        r, z = sigmoid(new[0] + x @ old[0]), sigmoid(new[1] + x @ old[1] - 2)
        return (1 - z) * x + z * xp.tanh(new[2] + (r * x) @ old[2])

    def attend(layer, x, seen):
        q, k, v = xp.split(layer["qkv"], 3, -1)
        found = []
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            query = (norm(x, layer, 0) @ q)[part]
            scores, values = [], []
            for distance, other in zip(range(len(seen) - 1, -1, -1), seen, strict=True):
                key, where = (norm(other, layer, 0) @ k)[part], (wave(distance) @ layer["position"])[part]
                score = (query + layer["content_bias"][part]) @ key + (query + layer["position_bias"][part]) @ where
                scores.append(xp.exp(score / np.sqrt(width)))
                values.append((norm(other, layer, 0) @ v)[part])
            found.append(sum(s * y for s, y in zip(scores, values, strict=True)) / sum(scores))
        return xp.concatenate(found) @ layer["out"]

    outputs, memories, flags = [], [], []
    for e in range(inputs.shape[1]):
        kept = [[memory[e, i, m] for m in range(context) if known[e, m]] for i in range(num_layers)]
        of_env = [], [], []
        for t in range(len(inputs)):
            if is_first[t, e]:
                kept = [[] for _ in kept]
            x = inputs[t, e] @ params["input"]
            for i, layer in enumerate(params["layers"]):
                seen = [*kept[i], x]
                kept[i] = seen[-context:]
                x = gate(layer["gates"][0], x, xp.maximum(attend(layer, x, seen), 0))
                y = xp.maximum(norm(x, layer, 1) @ layer["wide"], 0) @ layer["narrow"]
                x = gate(layer["gates"][1], x, xp.maximum(y, 0))
            missing = context - len(kept[0])
            of_env[0].append(x)
            of_env[1].append(xp.stack([xp.stack([xp.zeros(size)] * missing + steps) for steps in kept]))
            of_env[2].append(xp.array([0.0] * missing + [1.0] * len(kept[0])))
        for whole, one in zip((outputs, memories, flags), of_env, strict=True):
            whole.append(xp.stack(one))
    outputs, memories, flags = (xp.swapaxes(xp.stack(x), 0, 1) for x in (outputs, memories, flags))
    return outputs, (memories, flags)
