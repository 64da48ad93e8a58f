"""The names of the room, for type checkers and for `lazy`, which imports each at its first use."""

from msrl_jax.meta.meta_episodes import RL2 as RL2
from msrl_jax.meta.meta_episodes import RL3 as RL3
from msrl_jax.meta.meta_episodes import value_iteration as value_iteration
from msrl_jax.meta.tabular import BernoulliBandit as BernoulliBandit
from msrl_jax.meta.tabular import TabularMDP as TabularMDP
from msrl_jax.meta.tabular import random_bandits as random_bandits
from msrl_jax.meta.tabular import random_mdps as random_mdps
