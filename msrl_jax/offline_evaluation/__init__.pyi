"""The names of the room, for type checkers and for `lazy`, which imports each at its first use."""

from msrl_jax.offline_evaluation.fitted_q import FittedQ as FittedQ
from msrl_jax.offline_evaluation.fitted_q import OffPolicyEstimate as OffPolicyEstimate
from msrl_jax.offline_evaluation.fitted_q import estimate_return as estimate_return
