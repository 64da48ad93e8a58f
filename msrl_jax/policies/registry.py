"""Distribution policies by name."""

import inspect
from typing import Any

from msrl_jax import _registry
from msrl_jax._spelling import suggestion
from msrl_jax.fragments.placement import DistributionPolicy
from msrl_jax.policies.central import Central
from msrl_jax.policies.environments import Environments
from msrl_jax.policies.gpu_only import GPUOnly
from msrl_jax.policies.multi_learner import MultiLearner
from msrl_jax.policies.single_learner import SingleLearnerCoarse, SingleLearnerFine

POLICIES: dict[str, type] = {
    cls.__name__: cls
    for cls in (GPUOnly, MultiLearner, SingleLearnerCoarse, SingleLearnerFine, Environments, Central)
}


def register(policy: type) -> type:
    """Adds a distribution policy to the registry, so that `get` finds it by the name of its class.

    Args:
      policy: a dataclass with a method `layout(devices, sizes)`.

    Returns:
      The same class.

    Raises:
      ValueError: if another policy has that name.
    """
    return _registry.add("policy", POLICIES, policy.__name__, policy)


def names() -> list[str]:
    """The names of all distribution policies."""
    return sorted(POLICIES)


def get(policy: str | DistributionPolicy, **parameters: Any) -> DistributionPolicy:
    """Looks up a distribution policy.

    Args:
      policy: a name in `POLICIES` (case is ignored); `MODULE:CLASS` of one of your own, whose module is also looked for in the
        working directory; or a policy, which is returned unchanged.
      **parameters: the policy's parameters, such as `learners=2`.

    Returns:
      The policy.

    Raises:
      ValueError: if there is no such policy, or it has no such parameter; suggests the nearest.
      TypeError: if `policy` is neither a name nor a policy, or parameters are given for a policy object.
    """
    if not isinstance(policy, str):
        if not isinstance(policy, DistributionPolicy) or isinstance(policy, type):
            raise TypeError(f"{policy!r} is no distribution policy: it needs a method layout(devices, sizes)")
        if parameters:
            raise TypeError(f"{policy!r} is a policy already; set {sorted(parameters)} where it is made")
        return policy
    module, colon, rest = policy.partition(":")
    if colon and module.lower() in map(str.lower, POLICIES):
        raise ValueError(f"cannot read {rest!r} in {policy!r}; write {module}:key=value,key=value")
    if colon:
        cls: Any = _registry.imported("policy", policy, "a class with a method layout(devices, sizes)")
    else:
        cls = _registry.find("policy", POLICIES, policy)
    fields = list(inspect.signature(cls).parameters)
    for name in parameters:
        if name not in fields:
            others = [n for n, other in POLICIES.items() if name in inspect.signature(other).parameters]
            hint = f" (a parameter of {' and '.join(others)})" if others else suggestion(name, fields)
            raise ValueError(f"{cls.__name__} has no parameter {name!r}{hint}; its parameters are {', '.join(fields)}")
    return get(cls(**parameters))
