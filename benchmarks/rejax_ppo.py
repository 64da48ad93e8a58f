"""How fast rejax trains PPO on CartPole-v1; prints one line of JSON per setting.

Needs rejax 0.1.3, which wants an older gymnax than msrl_jax does: run it with the Python of an environment of its own.

    python rejax_ppo.py                                  every setting, median of three runs
    python rejax_ppo.py --worker --num-envs 64 --unroll-length 128
                                                         one setting; reads seconds per line, answers with steps/s

Initialisation and compilation are not timed, and nothing is evaluated while the clock runs.
"""

import argparse
import json
import statistics
import sys
import time

import jax
from rejax import PPO

SETTINGS = ((4, 128), (64, 128), (1024, 32))
EPOCHS, MINIBATCHES, HIDDEN, ACTIVATION = 4, 4, (64, 64), "tanh"
LEARNING_RATE, MAX_GRAD_NORM = 1e-3, 0.5
CHUNK_SECONDS = 0.25


class Trainer:
    """PPO of one setting, which trains on from where it left off."""

    def __init__(self, num_envs: int, unroll_length: int):
        """Initialises, compiles, and finds out how many iterations make a chunk of a quarter of a second."""
        self._setting = num_envs, unroll_length
        self._state = None
        start = time.perf_counter()
        self._compile(1)
        self.compile_seconds = time.perf_counter() - start
        self._chunks(2)
        self._compile(max(1, round(CHUNK_SECONDS * self._chunks(10) / (num_envs * unroll_length))))
        self._chunks(1)
        self._rate = self._chunks(1)

    def _compile(self, iterations: int) -> None:
        num_envs, unroll_length = self._setting
        self._steps = iterations * num_envs * unroll_length
        algorithm = PPO.create(
            env="CartPole-v1", num_envs=num_envs, num_steps=unroll_length, num_epochs=EPOCHS,
            num_minibatches=MINIBATCHES, learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM,
            agent_kwargs={"hidden_layer_sizes": HIDDEN, "activation": ACTIVATION},
            total_timesteps=self._steps, eval_freq=self._steps, skip_initial_evaluation=True,
        )  # fmt: skip
        algorithm = algorithm.replace(eval_callback=lambda algorithm, state, key: ())
        if self._state is None:
            # Its counters start as Python numbers; as arrays they keep their type from one call to the next.
            self._state = jax.tree.map(jax.numpy.asarray, algorithm.init_state(jax.random.PRNGKey(0)))
        train = jax.jit(lambda state: algorithm.train(train_state=state)[0])
        self._train = train.lower(self._state).compile()

    def _chunks(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self._state = self._train(self._state)
        jax.block_until_ready(self._state)
        return count * self._steps / (time.perf_counter() - start)

    def run(self, seconds: float) -> float:
        """Trains for about `seconds` and returns environment steps per second."""
        return self._chunks(max(1, round(seconds * self._rate / self._steps)))


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help="serve one setting: seconds in, steps per second out")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--unroll-length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    if args.worker:
        trainer = Trainer(args.num_envs, args.unroll_length)
        print(json.dumps({"compile_seconds": trainer.compile_seconds, "jax": jax.__version__}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"steps_per_second": trainer.run(float(line))}), flush=True)
        return
    for num_envs, unroll_length in SETTINGS:
        trainer = Trainer(num_envs, unroll_length)
        runs = [trainer.run(args.seconds) for _ in range(args.repeats)]
        row = {
            "num_envs": num_envs,
            "unroll_length": unroll_length,
            "steps_per_second": statistics.median(runs),
            "runs": runs,
            "compile_seconds": trainer.compile_seconds,
            "jax": jax.__version__,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
