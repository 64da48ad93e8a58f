"""Image observations in a layout that networks do not convolve: detection, and a wrapper that converts them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import Environment, PyTree, env_name
from msrl_jax.envs.wrappers import ObservationWrapper
from msrl_jax.fragments.support.tracebacks import entry

_LARGE = 36  # from this height and width on, networks use the convolutions of the first DQN and divide uint8 by 255


def unseen_images(env: Any) -> Iterator[str]:
    """Yields a warning for each image in the observations that networks do not treat as one."""
    for path, space, _ in spaces.arrays_of(env.observation_space):
        if isinstance(space, spaces.Box) and _is_unseen(space, is_whole=not path):
            place = f"part {path} of the observations" if path else "the observations"
            yield (
                f"{place} of {env_name(env)} looks like an image, {space.dtype}{list(space.shape)}, but networks convolve "
                "and scale only observations [H, W, C]; wrap the environment in msrl_jax.envs.AsImage, or pass a custom module "
                "as network="
            )


def _is_unseen(space: spaces.Box, is_whole: bool) -> bool:
    """Whether an array looks like an image that networks would flatten, or whose channels come first."""
    shape = space.shape
    if not (np.isfinite(space.low.astype(np.float64)).all() and np.isfinite(space.high.astype(np.float64)).all()):
        return False  # pixels have bounds
    if len(shape) == 3 and shape[0] < min(shape[1:]):
        return shape[1] == shape[2] or min(shape[1:]) >= _LARGE
    is_large = sum(size >= _LARGE for size in shape) >= 2
    return is_large and (len(shape) in (2, 4) or (len(shape) == 3 and not is_whole and space.dtype == np.uint8))


@entry
@dataclass(frozen=True)
class AsImage(ObservationWrapper):
    """Converts every observation to one image `[H, W, C]`, the layout that networks convolve.

    Channels of `[H, W]`, `[C, H, W]`, `[N, H, W, C]` and `[N, C, H, W]` are moved last, those of the first frame first. If two
    neighboring dimensions are equal, they are height and width; otherwise the smaller of the first and the last dimension is
    the channels. If an observation has several parts, images are concatenated along the channels in the order of sorted names,
    and every number of the other parts becomes a constant channel; integers of a `Discrete` space are one-hot encoded. The
    result is uint8 if all parts are uint8 images; otherwise it is float32, and uint8 parts are divided by 255.

    Attributes:
      env: the environment, in JAX or on the host; all images in an observation have the same height and width.
    """

    env: Environment

    def __post_init__(self):
        images: list[Any] = [space for _, space, _ in spaces.arrays_of(self.env.observation_space) if _is_image(space)]
        sizes = {_channels_last(x.shape, x.low).shape[:2] for x in images}
        if len(sizes) != 1:
            raise ValueError(
                "AsImage needs arrays of two to four dimensions with the same height and width, and "
                f"{env_name(self.env)} has observations in {self.env.observation_space}; remove the other parts"
            )

    @property
    def observation_space(self) -> spaces.Box:
        """A `Box` of shape `[H, W, C]`, uint8 or float32."""
        arrays = [part for _, part, _ in spaces.arrays_of(self.env.observation_space)]
        parts = [(part, part if _is_image(part) else spaces.flat_space(part)) for part in arrays]
        low, high = (_join_channels([(part, getattr(flat, bound)) for part, flat in parts], np) for bound in ("low", "high"))
        return spaces.Box(low, high, low.shape, low.dtype)

    def observe(self, obs: PyTree) -> jax.Array:
        """Returns the image of observations `[..., *observation_shape]`. `[..., H, W, C]`"""
        parts = spaces.arrays_of(self.env.observation_space, obs)
        return _join_channels(
            [(part, jnp.asarray(x) if _is_image(part) else spaces.flatten(part, x)) for _, part, x in parts], jnp
        )


def _is_image(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and 2 <= len(space.shape) <= 4


def _join_channels(parts: list[tuple[spaces.Space, Any]], numpy: Any) -> Any:
    """Concatenates images and constant channels, with NumPy or jax.numpy."""
    arrays = [_channels_last(part.shape, x) if _is_image(part) else x[..., None, None, :] for part, x in parts]
    if any(x.dtype != np.uint8 for x in arrays):
        arrays = [x.astype(np.float32) / (255 if x.dtype == np.uint8 else 1) for x in arrays]
    size = next(x.shape[-3:-1] for (part, _), x in zip(parts, arrays, strict=True) if _is_image(part))
    return numpy.concatenate([numpy.broadcast_to(x, (*x.shape[:-3], *size, x.shape[-1])) for x in arrays], axis=-1)


def _channels_last(shape: tuple[int, ...], x: Any) -> Any:
    """Images, arrays `[..., *shape]` of NumPy or JAX, as `[..., H, W, C]`."""
    if len(shape) == 2:
        return x[..., None]
    batch_axes, axes = range(x.ndim - len(shape)), list(range(x.ndim - len(shape), x.ndim))
    first, middle, last = shape[-3:]
    if (middle == last) if (first == middle) != (middle == last) else first < last:
        axes = [*axes[:-3], axes[-2], axes[-1], axes[-3]]
    if len(shape) == 4:
        axes = [axes[1], axes[2], axes[0], axes[3]]
    x = x.transpose(*batch_axes, *axes)
    return x.reshape(*x.shape[: len(batch_axes) + 2], -1)
