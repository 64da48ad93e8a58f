"""What population based training searches, and how: the specification, its checks and its text."""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax import algorithms
from msrl_jax._checks import whole
from msrl_jax._spec import read_values
from msrl_jax._spelling import suggestion
from msrl_jax.algorithms.config import tunable_fields
from msrl_jax.envs import distributions
from msrl_jax.envs.distributions import Distribution, Ramp
from msrl_jax.experiment.history import in_words

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
"""The type of a hyper-parameter."""

_WORDS = {"exploit": ("truncation", "tournament"), "explore": ("perturb", "resample")}

_SALT = 1711_09846
"""Keeps the draw of the initial values apart from other uses of the seed."""


@dataclasses.dataclass(frozen=True)
class PBT:
    """Population based training (Jaderberg et al., 2017, arXiv 1711.09846): members copy better ones and change what they copy.

    Every `every` iterations a member may take over parameters, state of the optimizer, statistics of the environment and
    hyper-parameters of another one (exploit). If it does, it changes these hyper-parameters (explore). Environments, replay
    buffers and keys stay its own.

    Attributes:
      search: field of the config -> `envs.uniform`, `envs.log_uniform` or `envs.choice`, also as text. Initial values are one
        from each of `members` equally probable parts of it; explored ones stay in its range.
      members: size of the population, `M`; usual: 8 to 80. Member `i` has the seed `seed + i`.
      every: iterations between two exploits.
      exploit: "truncation": a member of the worst `fraction` copies a random one of the best `fraction`. "tournament": every
        member draws another one, and copies it if that is better.
      fraction: share of the members that are replaced by truncation, at most a half; at least one is.
      explore: "perturb" multiplies each hyper-parameter by 0.8 or 1.2, or moves to a neighboring option of a `choice`.
        "resample" draws each anew with probability `resample_probability`, and keeps it otherwise.
      resample_probability: probability of a new draw.
      min_episodes: a member that has finished fewer episodes since it was last compared is not ready: it is neither replaced
        nor copied, and the others do not wait for it.
    """

    search: Mapping[str, Distribution] = dataclasses.field(hash=False)
    members: int = 8
    every: int = 20
    exploit: Literal["truncation", "tournament"] = "truncation"
    fraction: float = 0.2
    explore: Literal["perturb", "resample"] = "perturb"
    resample_probability: float = 0.25
    min_episodes: int = 1

    def __post_init__(self):
        if not isinstance(self.search, Mapping) or not self.search:
            raise ValueError(
                f"PBT.search={self.search!r}: name at least one field of the config, such as "
                "search={'learning_rate': msrl.envs.log_uniform(1e-5, 1e-2)}"
            )
        for name, least in (("members", 2), ("every", 1), ("min_episodes", 1)):
            object.__setattr__(self, name, whole(f"PBT.{name}", getattr(self, name), least))
        for name, options in _WORDS.items():
            if (word := getattr(self, name)) not in options:
                near = suggestion(word, options) if isinstance(word, str) else ""
                raise ValueError(f"PBT.{name}={word!r}{near}; use one of {', '.join(options)}")
        for name, most in (("fraction", 0.5), ("resample_probability", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) <= most:
                raise ValueError(f"PBT.{name}={value!r}: use a number above 0 and at most {most:g}")
            object.__setattr__(self, name, float(value))
        object.__setattr__(self, "search", {name: _distribution(name, x) for name, x in self.search.items()})

    def limits(self, name: str) -> tuple[float, float]:
        """The smallest and the largest value of a field."""
        values = self.search[name].numbers
        return min(values), max(values)

    def check(self, base: Any, overrides: Mapping[str, Any]) -> None:
        """Checks the search for a config."""
        kind, tunable = type(base).__name__, tunable_fields(type(base))
        for name in self.search:
            if name not in tunable:
                fact = f"{kind} has no field {name!r}{suggestion(name, tunable)}"
                if name in {field.name for field in dataclasses.fields(base)}:
                    fact = f"{name} of {kind} changes shapes or branches of the program"
                raise ValueError(f"PBT.search: {fact}; it can search {', '.join(tunable) or 'nothing'}")
        fixed = {name: value for name, value in overrides.items() if name not in self.search}
        for name, value in overrides.items():
            several = np.ndim(value) == 1 if isinstance(value, list | tuple | range | np.ndarray | jax.Array) else False
            if name in self.search and not (several and len(value) == self.members):
                raise ValueError(
                    f"{name}={value!r}: PBT.search changes it; leave it out, or give the {self.members} initial values of the "
                    "members"
                )
            if name in self.search:
                self._check_initial(name, value)
            elif name in tunable and several:
                raise ValueError(
                    f"{name}={value!r}: members differ in it, but PBT.search does not name it; add it there, or give one number"
                )
        for name, distribution in self.search.items():
            for value in distribution.numbers:
                try:
                    algorithms.make(base, {**fixed, name: value})
                except ValueError as error:
                    raise ValueError(f"PBT.search: {in_words({name: value})} of {name}={distribution}: {error}") from None

    def _check_initial(self, name: str, values: Any) -> None:
        distribution = self.search[name]
        options = np.asarray(distribution.numbers, np.float32)
        for member, given in enumerate(values):
            if not isinstance(given, numbers.Real | np.generic | jax.Array):
                continue  # what is no number is refused with the other fields
            value = np.float32(given)  # as members have it
            if not options.min() <= value <= options.max() or (distribution.kind == "choice" and value not in options):
                raise ValueError(
                    f"{name}={value:g} of member {member} does not lie in PBT.search, {distribution}; give an initial value "
                    "that does, or a wider range"
                )

    def check_chunk(self, chunk: int) -> None:
        """Raises ValueError unless chunks of so many iterations end at the exploits."""
        if self.every % chunk:
            raise ValueError(
                f"chunk={chunk} does not divide PBT.every={self.every}, so a row of the history would mix hyper-parameters "
                "from before and after an exploit; use a chunk that does, or leave it out"
            )

    def initial(self, seed: int) -> dict[str, tuple[float, ...]]:
        """The initial values of all members, `[M]` by field."""
        random = np.random.default_rng([_SALT, seed])
        found = {}
        for name in sorted(self.search):
            quantiles = (random.permutation(self.members) + random.random(self.members)) / self.members
            values = np.asarray(_at_quantiles(self.search[name], quantiles), np.float32)
            found[name] = tuple(map(float, values))
        return found

    def to_json(self) -> dict[str, Any]:
        """The specification as plain data, for `read`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"search": {name: distributions.text(x) for name, x in sorted(self.search.items())}}


GivenPBT: TypeAlias = PBT | Mapping[str, Any] | str
"""A specification; or its fields; or these as text, where every other name is a field of `search`:
`"members=8,every=20,learning_rate=log_uniform:1e-5:1e-2"`."""


def read(given: GivenPBT) -> PBT:
    """Reads a specification."""
    if isinstance(given, PBT):
        return given
    own = [field.name for field in dataclasses.fields(PBT)]
    if isinstance(given, str):
        wrong = f"cannot read {given!r} as parameters; write name=value,name=uniform:0.25:1"
        values = read_values(given, distributions.CALLS, wrong=wrong)
        search = {name: x for name, x in values.items() if name not in own}
        for name, x in search.items():
            if not isinstance(x, Distribution) and (near := suggestion(name, own)):
                raise ValueError(f"pbt has no field {name!r}{near}; its fields are {', '.join(own)}")
        return PBT(search, **{name: x for name, x in values.items() if name in own})
    if not isinstance(given, Mapping):
        raise TypeError(f"pbt={given!r}: give msrl.PBT(search=..., members=..., every=...)")
    for name in given:
        if name not in own:
            raise ValueError(f"pbt has no field {name!r}{suggestion(str(name), own)}; its fields are {', '.join(own)}")
    return PBT(**{"search": {}, **given})


def _distribution(name: str, value: Any) -> Distribution:
    """A checked distribution, with Python numbers."""
    what = f"PBT.search[{name!r}]"
    value = distributions.parse(what, value) if isinstance(value, str) else value
    if not isinstance(value, Distribution):
        raise ValueError(
            f"{what}={value!r} is no distribution; use msrl.envs.uniform(low, high), log_uniform(low, high) or choice([...])"
        )
    if any(isinstance(x, Ramp) for x in value.numbers):
        raise ValueError(f"{what}={value}: a range cannot follow a ramp; use numbers")
    distributions.cast(what, value, NUMBER)
    options = tuple(sorted({float(x) for x in value.numbers})) if value.kind == "choice" else tuple(map(float, value.numbers))
    if options[0] == options[-1]:
        raise ValueError(f"{what}={value} has one value only; give it to train as {name}={options[0]:g}")
    return Distribution(value.kind, options)


def _at_quantiles(distribution: Distribution, quantiles: np.ndarray) -> np.ndarray:
    options = np.asarray(distribution.numbers)
    if distribution.kind == "choice":
        return options[(quantiles * len(options)).astype(int)]
    low, high = np.log(options) if distribution.kind == "log_uniform" else options
    values = low + quantiles * (high - low)
    return np.clip(np.exp(values) if distribution.kind == "log_uniform" else values, *options)
