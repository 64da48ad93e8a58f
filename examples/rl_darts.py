"""RL-DARTS (Miao et al., 2021, arXiv 2106.02229): a network finds its own operations while it learns to act.

    python examples/rl_darts.py --svg docs/example_rl_darts.svg
    python examples/rl_darts.py --algorithms ppo --games Breakout --policy SingleLearnerCoarse --cpu-devices 4

A cell is a graph: a node is a sum over nodes before it, of an operation of each. Numbers `alpha` decide which operation, and
the loss of the algorithm trains them like all others. The supernet mixes all operations, weighted by the softmax of `alpha`;
`discretize` keeps the heaviest. Both are modules that the package's PPO and DQN take as their `network`. In the shape
descriptions, `B` is the batch size, `H` and `W` are height and width, `C` is the number of channels, and `O` of operations.
"""

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import msrl_jax as msrl
from msrl_jax.algorithms import DQN, PPO, Replay
from msrl_jax.cli import argument_types
from msrl_jax.kernels.networks import matmul
from msrl_jax.networks.convolutions import convolution
from msrl_jax.networks.layers import dense
from msrl_jax.report import curves

Cell = tuple[tuple[tuple[int, str], ...], ...]
"""The edges into each node: the number of a node before it, where 0 is what comes in, and the name of an operation."""
FILTERS = {"conv3x3": 3, "conv5x5": 5}
OPERATIONS = (*FILTERS, "max_pool", "identity", "zero")
WINDOW = max(FILTERS.values())

ALGORITHMS: dict[str, Any] = {
    "ppo": PPO(num_envs=64, anneal_learning_rate=True, shared_torso=True, hidden_sizes=(128,), activation="relu"),
    "dqn": DQN(learning_rate=1e-3, replay=Replay(100_000), hidden_sizes=(128,)),
}
LENGTHS = {"ppo": (122_880, 1), "dqn": (50_000, 16)}  # steps of a run, and iterations between two points of a curve
GAMES = ("Breakout", "SpaceInvaders")
CNN, SUPERNET, DISCRETE = NETWORKS = ("CNN", "supernet", "discrete cell")


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves small images with filters `[5, 5, C, C]`, at the borders with zeros, by one product of matrices.

    An image is a row, and the matrix has an entry for each pair of places and of channels. With 5 x 5 places, and gradients,
    this is several times as fast as a convolution on a CPU.

    Args:
      x: images. shape=[B, H, W, C]
      kernel: the filters.

    Returns:
      Images. shape=[B, H, W, C]
    """
    height, width, channels = x.shape[1:]
    row, column = (i.ravel() for i in np.indices((height, width)))  # of each place
    margins = [(size - 1 - WINDOW // 2,) * 2 + (0,) for size in (height, width)]  # below 0 if images are smaller than filters
    padded = jax.lax.pad(kernel, jnp.zeros((), kernel.dtype), [*margins, (0, 0, 0), (0, 0, 0)])
    matrix = padded[row[:, None] - row + height - 1, column[:, None] - column + width - 1]  # [HW before, HW after, C, C]
    matrix = jnp.swapaxes(matrix, 1, 2).reshape(height * width * channels, -1)
    return matmul(x.reshape(len(x), -1), matrix).reshape(x.shape)


def max_pool(x: jax.Array) -> jax.Array:
    """The largest value in each window of 3 x 3; of maxima of slices, as their gradients are fast. `[B, H, W, C]`"""
    for axis in (1, 2):
        padded = jnp.pad(x, [(int(i == axis),) * 2 for i in range(4)], constant_values=-jnp.inf)
        parts = (jax.lax.slice_in_dim(padded, i, i + x.shape[axis], axis=axis) for i in range(3))
        x = functools.reduce(jnp.maximum, parts)
    return x


class CellNetwork(nn.Module):
    """A first convolution, a cell, a dense layer: of images `[B, 2H, 2W, ...]`, features `[B, num_features]`.

    Attributes:
      operations: those of `OPERATIONS` that the supernet mixes on each edge.
      num_nodes: nodes of the cell, but for what comes in. The dense layer sees them all.
      channels: of each node, `C`.
      num_features: width of the dense layer.
      alpha_rate: a factor of `alpha`. As Adam's steps do not depend on it, weights learn so many times as fast.
      cell: the edges of a discrete cell; None: the supernet, with all edges and operations.
    """

    operations: tuple[str, ...] = OPERATIONS
    num_nodes: int = 3
    channels: int = 8
    num_features: int = 128
    alpha_rate: float = 10.0
    cell: Cell | None = None

    def __post_init__(self):
        """Raises ValueError if operations are missing or unknown, or if edges or sizes are invalid."""
        cell, known = self.cell, ", ".join(OPERATIONS)
        nodes = [self.operations] if cell is None else [[name for _, name in into] for into in cell]
        if unknown := [name for names in nodes for name in names if name not in OPERATIONS]:
            raise ValueError(f"operation {unknown[0]!r} is unknown; use some of {known}")
        if not nodes or not all(set(names) - {"zero"} for names in nodes):
            given = f"operations={self.operations}" if cell is None else f"cell={cell}"
            raise ValueError(f"{given}: a node without operations computes nothing; use some of {known}, and not zero alone")
        for n, into in enumerate(cell or (), 1):
            if loose := [i for i, _ in into if i not in range(n)]:
                raise ValueError(f"cell={cell}: an edge into node {n} comes from {loose[0]}; use a node before it, from 0 on")
        if len({*self.operations}) < len(self.operations):
            raise ValueError(f"operations={self.operations}: name each once")
        super().__post_init__()

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Maps images to features."""
        if self.cell is None:
            shape = self.num_nodes * (self.num_nodes + 1) // 2, len(self.operations)
            rows = iter(nn.softmax(self.alpha_rate * self.param("alpha", nn.initializers.zeros, shape)))
            inputs = [range(n) for n in range(1, self.num_nodes + 1)]
            edges = [[(i, dict(zip(self.operations, next(rows), strict=True))) for i in before] for before in inputs]
        else:
            edges = [[(i, {name: 1.0}) for i, name in into] for into in self.cell]
        nodes = [nn.relu(convolution(self.channels, 2, 2)(obs.astype(jnp.float32)))]
        for n, into in enumerate(edges, 1):
            nodes.append(nn.relu(sum(self.mixed(nodes[i], weights, f"{i}_{n}") for i, weights in into)))
        x = jnp.concatenate(nodes[1:], -1)
        return nn.relu(dense(self.num_features, math.sqrt(2))(x.reshape(len(x), -1)))

    def mixed(self, x: jax.Array, weights: Mapping[str, Any], name: str) -> Any:
        """The sum of operations on an edge, each times its weight. `[B, H, W, C]`

        A convolution is linear in its filters, so those of several sizes are added up first, and applied once.
        """
        total, kernel = 0.0, None
        for operation, weight in weights.items():
            if size := FILTERS.get(operation):
                shape = (size, size, self.channels, self.channels)
                filters = self.param(f"{operation}_{name}", nn.initializers.he_normal(), shape)
                margin = ((WINDOW - size) // 2,) * 2
                filters = weight * jnp.pad(filters, (margin, margin, (0, 0), (0, 0)))
                kernel = filters if kernel is None else kernel + filters
            elif operation != "zero":
                total += weight * (max_pool(x) if operation == "max_pool" else x)
        return total if kernel is None else total + convolve(x, kernel)


def weights_of(network: CellNetwork, params: Any) -> np.ndarray:
    """The weights of a supernet's operations on each edge, of the actor's network if the critic has another. `[edges, O]`"""
    leaves = jax.tree.leaves_with_path(params)
    alpha = next(leaf for path, leaf in leaves if jax.tree_util.keystr(path[-1:]) == "['alpha']")
    return np.asarray(nn.softmax(network.alpha_rate * alpha))


def entropy(weights: np.ndarray) -> float:
    """The entropy of weights `[edges, O]`, a mean over edges, over that of equal weights: from 0 to 1."""
    return float(jax.scipy.special.entr(weights).sum(-1).mean() / np.log(max(weights.shape[-1], 2)))


def discretize(result: msrl.Result, member: int | None = None) -> CellNetwork:
    """The network of the cell that a supernet has found (Liu et al., 2019, arXiv 1806.09055, section 2.4).

    An edge keeps its heaviest operation but zero, and a node its two heaviest edges. Their weights are 1.

    Args:
      result: of a run whose `network` is a supernet.
      member: the member, if the run has several.

    Returns:
      The network, to be trained from scratch. `network.cell` is the cell that was found.

    Raises:
      TypeError: if the run's network is not a supernet.
    """
    network = result.config.network
    if not isinstance(network, CellNetwork) or network.cell is not None:
        what = "a discrete cell" if isinstance(network, CellNetwork) else f"network={network!r}"
        raise TypeError(f"discretize: the run has {what}, which is not a supernet; train with network=CellNetwork()")
    weights = weights_of(network, result.member_state(member).params)
    weights = np.where([name == "zero" for name in network.operations], -1.0, weights)
    best = [network.operations[k] for k in weights.argmax(-1)]
    cell, first = [], 0
    for n in range(1, network.num_nodes + 1):  # the number of edges of a node is the number of earlier nodes
        heaviest = np.argsort(-weights[first : first + n].max(-1), kind="stable")[:2]
        cell.append(tuple((int(i), best[first + i]) for i in sorted(heaviest)))
        first += n
    return network.clone(cell=tuple(cell))


def train(algorithm: str, game: str, network: Any, seed: int, **given: Any) -> msrl.Result:
    """Trains one of `ALGORITHMS` with a network, without a display."""
    steps, chunk = LENGTHS[algorithm]
    given = {"total_steps": steps, "chunk": chunk, "eval_episodes": 0, "progress": False} | given
    return msrl.train(dataclasses.replace(ALGORITHMS[algorithm], network=network), f"{game}-MinAtar", seed=seed, **given)


def search(
    algorithm: str,
    game: str,
    seed: int,
    supernet: CellNetwork = CellNetwork(),  # noqa: B008
    **given: Any,
) -> tuple[dict[str, msrl.Result], np.ndarray]:
    """Trains the CNN, a supernet, and then the cell that it finds, from scratch.

    Args:
      algorithm, game, seed, given: what `train` takes.
      supernet: where to search.

    Returns:
      The runs, by the names in `NETWORKS`, and the entropy of the supernet's weights after each chunk. shape=[C]
    """
    entropies = []

    def note(tick: Any) -> None:
        entropies.append(entropy(weights_of(supernet, tick.state.params)))

    runs = {CNN: train(algorithm, game, "cnn", seed, **given)}
    runs[SUPERNET] = train(algorithm, game, supernet, seed, callbacks=[note], **given)
    runs[DISCRETE] = train(algorithm, game, discretize(runs[SUPERNET]), seed, **given)
    return runs, np.array(entropies)


def late(result: msrl.Result) -> float:
    """The mean return of episodes in the last tenth of a run."""
    done = result.history["step"] / result.history["step"][-1]
    return float(np.nanmean(result.history["episode_return"][done > 0.9]))


def costs(algorithm: str, networks: Sequence[Any], rounds: int = 5, game: str = GAMES[0]) -> np.ndarray:
    """Measures the cost of a step of the environment, with its share of the updates.

    Args:
      algorithm: a name in `ALGORITHMS`.
      networks: what to compare. They take turns, so that whatever else the machine does slows all of them down.
      rounds: how many turns each has.
      game: a name in `GAMES`.

    Returns:
      FLOPs, as XLA counts them, and seconds, the least of all turns. shape=[networks, 2]
    """
    configs = [dataclasses.replace(ALGORITHMS[algorithm], network=network) for network in networks]
    runs = [msrl.Experiment(algorithm=config, env=f"{game}-MinAtar") for config in configs]
    programs = [run.compile(msrl.policies.GPUOnly(), jax.devices()[:1]) for run in runs]
    steps = runs[0].steps_per_iteration
    fragments = [[f for f in program.explain().fragments if f.depth == 0] for program in programs]
    flops = [sum((f.flops or 0) * f.calls for f in each) / steps for each in fragments]
    states = [run.start(program) for run, program in zip(runs, programs, strict=True)]
    seconds = np.empty((1 + rounds, len(programs)))  # the first round compiles, and fills the buffer
    for row in seconds:
        for i, program in enumerate(programs):
            begin = time.perf_counter()
            states[i], _ = jax.block_until_ready(program.run(states[i], count := 1 + 8192 // steps))
            row[i] = (time.perf_counter() - begin) / (count * steps)
    return np.stack([flops, seconds[1:].min(0)], -1)


def figure(found: Mapping[str, Sequence[tuple[Mapping[str, Any], np.ndarray]]]) -> str:
    """Draws returns by algorithm and game, and entropies, with 95% intervals of the means over seeds.

    The values are what `search` returns, for each seed.
    """
    with curves.styled():
        drawn, panels = curves.figure_of(len(found) + 1)
        for row, ((title, seeds), panel) in enumerate(zip(found.items(), panels, strict=False)):
            step = seeds[0][0][CNN].history["step"]
            for number, name in enumerate(NETWORKS):
                returns = np.stack([runs[name].history["episode_return"] for runs, _ in seeds], -1)
                curves.draw_curve(panel, name, number, *curves.mean_curve(step, returns))
            panel.set(title=title, xlabel="environment steps", ylabel="return")
            entropies = np.stack([each for _, each in seeds], -1)
            curves.draw_curve(panels[-1], title, row, *curves.mean_curve(step / step[-1], entropies))
        panels[-1].set(title="the search", xlabel="share of the steps", ylabel="entropy of the weights")
        return curves.svg_of(curves.finished(drawn))


def main(arguments: Sequence[str] | None = None) -> None:
    """Searches with all algorithms in all games on all seeds, and prints returns, entropies, cells and costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", choices=ALGORITHMS, nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--games", choices=GAMES, nargs="+", default=list(GAMES))
    parser.add_argument("--seeds", type=argument_types.positive_int, default=3, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--policy", default="GPUOnly")
    parser.add_argument("--cpu-devices", type=argument_types.cpu_devices)
    parser.add_argument("--svg", type=argument_types.new_file, help="file for a figure")
    args = parser.parse_args(arguments)
    found = {}
    for algorithm in args.algorithms:
        for game in args.games:
            found[f"{algorithm}, {game}"] = seeds = []
            for seed in range(args.seeds):
                runs, entropies = search(algorithm, game, seed, policy=args.policy)
                runs = {name: dataclasses.replace(run, run_state=None) for name, run in runs.items()}  # it has the buffer
                seeds.append((runs, entropies))
                returns = ", ".join(f"{name} {late(run):.2f}" for name, run in runs.items())
                print(f"{algorithm}, {game}, seed {seed}: {returns}; entropy {entropies[-1]:.2f};", end=" ")
                print(runs[DISCRETE].config.network.cell, flush=True)
        cells = [runs[DISCRETE].config.network for searches in found.values() for runs, _ in searches]
        measured = costs(algorithm, ["cnn", CellNetwork(), cells[-1]])
        for name, (flops, seconds) in zip(NETWORKS, measured, strict=True):
            print(f"{algorithm}, {name}: {flops / 1e6:.2f} MFLOPs and {1e6 * seconds:.0f} us per step", flush=True)
    if args.svg:
        args.svg.write_text(figure(found))


if __name__ == "__main__":
    main()
