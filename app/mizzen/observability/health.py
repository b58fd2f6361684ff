"""One snapshot, one rendering: /health/startup, /health/live and /health/ready say the same on every port.

The supervisor owns the snapshot. Its own health port and the api port both answer with ``render``.
"""

from typing import Any, Literal

from mizzen.ipc.messages import Health

Probe = Literal["startup", "live", "ready"]

# Before a process has heard from the supervisor: alive, nothing more.
UNKNOWN = Health(startup=False, live=True, ready=False, phase="start", phase_s=0.0)


def render(health: Health, which: Probe) -> tuple[int, dict[str, Any]]:
    """The probe's HTTP status (200 or 503) and JSON body. Pure: no clock, no state."""
    ok = {"startup": health.startup, "live": health.live, "ready": health.ready}[which]
    load = health.load
    body = {
        "status": "ok" if ok else "unavailable",
        "startup": health.startup,
        "live": health.live,
        "ready": health.ready,
        "phase": health.phase,
        "phase_s": round(health.phase_s, 3),
        "detail": health.detail,
        "fraction": health.fraction,
        "draining": health.draining,
        "epoch": health.epoch,
        "restarts": health.restarts,
        "running": load.running,
        "waiting": load.waiting,
        "kv_pages_total": load.kv_pages_total,
        "kv_pages_used": load.kv_pages_used,
        "kv_pages_cached": load.kv_pages_cached,
        "processes": dict(health.processes),
    }
    return (200 if ok else 503), body


def describe(health: Health) -> str:
    """Why requests are not served, in a few words: "draining" or "load for 12 s, 40%: layer 12 of 30"."""
    if health.draining:
        return "draining"
    text = f"{health.phase} for {health.phase_s:.0f} s"
    if health.fraction is not None:
        text += f", {health.fraction:.0%}"
    return f"{text}: {health.detail}" if health.detail else text
