"""Measures the training speed of rejax; prints one line of JSON per setting.

It needs rejax 0.1.3, which requires an older gymnax than msrl_jax: run it with the Python of a separate environment.

    python rejax_worker.py --algo dqn                   every setting, median of three runs
    python rejax_worker.py --algo dqn --setting '{...}' one setting; reads seconds per line, answers with steps/s

Times exclude initialization, compilation and evaluation, and start after the first updates. `ALGORITHMS` lists the algorithms,
and `SETTINGS` their settings, with the field names of msrl_jax's configs.
"""

import argparse
import json
import statistics
import sys
import time

HIDDEN, LEARNING_RATE, DISCOUNT = (64, 64), 1e-3, 0.99
ON_POLICY = {"num_epochs": 4, "num_minibatches": 4, "activation": "tanh", "max_grad_norm": 0.5}
OFF_POLICY = {"activation": "relu", "max_grad_norm": 10.0, "tau": 0.02, "unroll_length": 1}
SIZES = [
    {"num_envs": e, "num_updates": k, "batch_size": b, "capacity": c, "learning_starts": 2 * b}
    for e, k, b, c in ((1, 1, 32, 10_000), (16, 2, 128, 20_000), (128, 8, 256, 100_000))
]  # fmt: skip
SETTINGS = {
    "ppo": [ON_POLICY | {"num_envs": e, "unroll_length": t} for e, t in ((4, 128), (64, 128), (1024, 32))],
    "dqn": [OFF_POLICY | size | {"double": True} for size in SIZES],
    "sac": [OFF_POLICY | size for size in SIZES],
    "td3": [OFF_POLICY | size | {"policy_period": 2, "exploration_noise": 0.1} for size in SIZES],
}  # fmt: skip
ENVS = {"ppo": "CartPole-v1", "dqn": "CartPole-v1", "sac": "Pendulum-v1", "td3": "Pendulum-v1"}
CHUNK_SECONDS = 0.25


def ppo(setting: dict) -> dict:
    """rejax's arguments for a setting of PPO."""
    names = {"unroll_length": "num_steps", "num_epochs": "num_epochs", "num_minibatches": "num_minibatches"}
    agent = {"hidden_layer_sizes": HIDDEN, "activation": setting["activation"]}
    return {theirs: setting[ours] for ours, theirs in names.items()} | {"agent_kwargs": agent}


def off_policy(setting: dict) -> dict:
    """rejax's arguments for a setting of an off-policy algorithm; rejax takes one step per iteration.

    Its networks have two layers of width 64, and other widths are not possible.
    """
    names = {"num_updates": "num_epochs", "capacity": "buffer_size", "learning_starts": "fill_buffer"}
    names |= {"batch_size": "batch_size"}
    fixed = {"polyak": 1 - setting["tau"], "target_update_freq": 1}
    return {theirs: setting[ours] for ours, theirs in names.items()} | fixed


def dqn(setting: dict) -> dict:
    """rejax's arguments for a setting of DQN."""
    return off_policy(setting) | {"agent_kwargs": {"activation": setting["activation"]}, "ddqn": setting["double"]}


def sac(setting: dict) -> dict:
    """rejax's arguments for a setting of SAC."""
    return off_policy(setting) | {"agent_kwargs": {"activation": setting["activation"]}}


def td3(setting: dict) -> dict:
    """rejax's arguments for a setting of TD3; an iteration of rejax takes `policy_period` steps."""
    networks = {name: {"activation": setting["activation"]} for name in ("actor_kwargs", "critic_kwargs")}
    noise = {"policy_delay": setting["policy_period"], "exploration_noise": setting["exploration_noise"]}
    return off_policy(setting) | networks | noise


ALGORITHMS = {"ppo": ("PPO", ppo), "dqn": ("DQN", dqn), "sac": ("SAC", sac), "td3": ("TD3", td3)}


class Trainer:
    """An algorithm with one setting; every call continues the training."""

    def __init__(self, algo: str, setting: dict):
        """Initializes, compiles, and measures how many iterations take a quarter of a second."""
        self._algo, self._setting, self._state = algo, setting, None
        self._steps_per_iteration = setting["num_envs"] * setting["unroll_length"] * setting.get("policy_period", 1)
        start = time.perf_counter()
        warm_up = 2 + setting.get("learning_starts", 0) // self._steps_per_iteration
        self._compile(warm_up)
        self.compile_seconds = time.perf_counter() - start
        self._chunks(1)
        rate = self._chunks(max(1, 10 // warm_up))
        self._compile(max(1, round(CHUNK_SECONDS * rate / self._steps_per_iteration)))
        self._chunks(1)
        self._rate = self._chunks(1)

    def _compile(self, iterations: int) -> None:
        import jax
        import rejax

        self._steps, setting = iterations * self._steps_per_iteration, self._setting
        name, arguments = ALGORITHMS[self._algo]
        algorithm = getattr(rejax, name).create(
            env=ENVS[self._algo], num_envs=setting["num_envs"], **arguments(setting), gamma=DISCOUNT,
            learning_rate=LEARNING_RATE, max_grad_norm=setting["max_grad_norm"], total_timesteps=self._steps,
            eval_freq=self._steps, skip_initial_evaluation=True,
        )  # fmt: skip
        algorithm = algorithm.replace(eval_callback=lambda algorithm, state, key: ())
        if self._state is None:
            # rejax's counters start as Python numbers; as arrays, they keep their types between calls.
            self._state = jax.tree.map(jax.numpy.asarray, algorithm.init_state(jax.random.PRNGKey(0)))
        train = jax.jit(lambda state: algorithm.train(train_state=state)[0])
        self._train = train.lower(self._state).compile()

    def _chunks(self, count: int) -> float:
        import jax

        start = time.perf_counter()
        for _ in range(count):
            self._state = self._train(self._state)
        jax.block_until_ready(self._state)
        return count * self._steps / (time.perf_counter() - start)

    def run(self, seconds: float) -> float:
        """Trains for about `seconds`, and returns environment steps per second."""
        return self._chunks(max(1, round(seconds * self._rate / self._steps)))


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=ALGORITHMS, default="ppo")
    parser.add_argument("--setting", type=json.loads, help="measure this one: read seconds from stdin, print steps per second")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    if args.setting:
        trainer = Trainer(args.algo, args.setting)
        print(json.dumps({"compile_seconds": trainer.compile_seconds}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"steps_per_second": trainer.run(float(line))}), flush=True)
        return
    for setting in SETTINGS[args.algo]:
        trainer = Trainer(args.algo, setting)
        runs = [trainer.run(args.seconds) for _ in range(args.repeats)]
        rates = {"steps_per_second": statistics.median(runs), "runs": runs, "compile_seconds": trainer.compile_seconds}
        print(json.dumps({"algo": args.algo} | setting | rates), flush=True)


if __name__ == "__main__":
    main()
