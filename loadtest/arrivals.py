"""When requests are due is drawn before the first leaves, so that nothing the server does can change it.

An open loop's times are a process of unit rate (constant, Poisson or gamma gaps) stretched by the rate; a ramp
stretches by the rate as it rises: a request is due when the integral of the rate has reached its place in the process.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
import numpy as np

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Closed(msgspec.Struct, tag="closed", tag_field="kind", forbid_unknown_fields=True, frozen=True):
    """``concurrency`` users, each of whom asks again once answered; they come in evenly over ``ramp_s``."""

    concurrency: Count
    ramp_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Open(msgspec.Struct, tag="open", tag_field="kind", forbid_unknown_fields=True, frozen=True):
    """``rate`` requests a second, whatever the server does.

    ``gaps``: constant, poisson, or gamma with the shape ``burstiness`` (1 is Poisson, below 1 comes in bursts, above 1
    is steadier). ``end_rate``: the rate rises or falls evenly to this over the run's duration.
    """

    rate: Positive
    gaps: Literal["constant", "poisson", "gamma"] = "poisson"
    burstiness: Positive = 1.0
    end_rate: Positive | None = None


class Replay(msgspec.Struct, tag="replay", tag_field="kind", forbid_unknown_fields=True, frozen=True):
    """The trace's own times, ``speed`` times as fast."""

    speed: Positive = 1.0


Load = Closed | Open | Replay


def due_times(load: Open, source: np.random.Generator, duration_s: float | None) -> Iterator[float]:
    """Seconds from the start, rising, without end; up to ``duration_s`` if that is given. A ramp needs it."""
    if load.end_rate is not None and duration_s is None:
        raise ValueError("a ramp (load.end_rate) needs duration_s: it ends there")
    place = 0.0  # in the process of unit rate
    while True:
        for gap in _gaps(load, source, 1024):
            due_s = _when(load, place, duration_s)
            if duration_s is not None and (due_s is None or due_s >= duration_s):
                return
            assert due_s is not None
            yield due_s
            place += gap


def _gaps(load: Open, source: np.random.Generator, count: int) -> list[float]:
    """Of mean 1."""
    if load.gaps == "constant":
        return [1.0] * count
    if load.gaps == "poisson":
        return list(source.exponential(1.0, count))
    return list(source.gamma(load.burstiness, 1.0 / load.burstiness, count))


def _when(load: Open, place: float, duration_s: float | None) -> float | None:
    """When the integral of the rate reaches ``place``; None: not before a falling rate would be zero."""
    if load.end_rate is None or duration_s is None:
        return place / load.rate
    slope = (load.end_rate - load.rate) / duration_s
    root = load.rate**2 + 2 * slope * place
    if root < 0:
        return None
    # The stable form of (-rate + sqrt(root)) / slope: right for a slope of nearly 0 too.
    return 2 * place / (load.rate + float(np.sqrt(root)))
