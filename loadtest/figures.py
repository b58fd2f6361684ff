"""Figures that several measurements give."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def percentiles(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """Mean, P50, P90, P95, P99 and largest; empty for no values."""
    if not len(values):
        return {}
    p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
    return {"count": len(values), "mean": float(np.mean(values)), "p50": p50, "p90": p90, "p95": p95, "p99": p99,
            "max": float(np.max(values))}  # fmt: skip
