"""Distributional Q-learning in plain formulas, to compare with."""

import numpy as np

N, V_MIN, V_MAX = 7, -2.0, 4.0  # atoms at -2, -1, ..., 4


def plain_projection(masses, reward, discount):
    """Algorithm 1 of the paper, atom by atom in float64."""
    spacing, out = (V_MAX - V_MIN) / (N - 1), np.zeros(N)
    for j in range(N):
        landed = np.clip(reward + discount * (V_MIN + j * spacing), V_MIN, V_MAX)
        b = (landed - V_MIN) / spacing
        low, high = int(np.floor(b)), int(np.ceil(b))
        if low == high:
            out[low] += masses[j]
        else:
            out[low] += masses[j] * (high - b)
            out[high] += masses[j] * (b - low)
    return out


def plain_quantile_loss(quantile, target, delta):
    total = 0.0
    for i, theta in enumerate(quantile.astype(np.float64)):
        for sample in target.astype(np.float64):
            u = sample - theta
            size = u * u / 2 if abs(u) <= delta else delta * (abs(u) - delta / 2)
            total += abs((i + 0.5) / len(quantile) - (u < 0)) * size / delta / len(target)
    return total
