"""The names of the room, for type checkers and for `lazy`, which imports each at its first use."""

from msrl_jax.rnd.distillation import exploring as exploring
from msrl_jax.rnd.explorers import A2CRND as A2CRND
from msrl_jax.rnd.explorers import IMPALARND as IMPALARND
from msrl_jax.rnd.explorers import PPORND as PPORND
