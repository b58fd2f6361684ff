"""What only the supervisor knows, as metrics: its health snapshot with the engine's load, restarts, heartbeats."""

from typing import get_args

from mizzen.ipc.messages import Phase
from mizzen.observability.feed import Feed
from mizzen.supervisor.policy import Policy


class SupervisorMetrics:
    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._restarts: dict[str, int] = {}  # as told so far

    def report(self, policy: Policy, now: float) -> None:
        """Sends them, as often as the feed allows."""
        feed = self._feed
        if not feed.due():
            return
        health = policy.health(now)
        load = health.load
        waiting = dict.fromkeys(("slots", "kv_pages", "batch_tokens"), 0)
        waiting[load.waiting_for] = load.waiting - load.waiting_preempted
        for reason, count in waiting.items():
            feed.gauge("mizzen_requests_waiting", reason).set(count)
        feed.gauge("mizzen_requests_waiting", "preempted").set(load.waiting_preempted)
        feed.gauge("mizzen_requests_running").set(load.running)
        free = load.kv_pages_total - load.kv_pages_used - load.kv_pages_cached
        feed.gauge("mizzen_kv_cache_pages", "used").set(load.kv_pages_used)
        feed.gauge("mizzen_kv_cache_pages", "cached").set(load.kv_pages_cached)
        feed.gauge("mizzen_kv_cache_pages", "free").set(free)
        feed.gauge("mizzen_kv_cache_capacity_pages").set(health.engine.num_pages if health.engine else 0)
        feed.gauge("mizzen_kv_cache_usage_ratio").set(load.kv_pages_used / max(1, load.kv_pages_total))
        feed.gauge("mizzen_ready").set(health.ready)
        feed.gauge("mizzen_live").set(health.live)
        feed.gauge("mizzen_draining").set(health.draining)
        for phase in get_args(Phase):
            feed.gauge("mizzen_phase", phase).set(phase == health.phase)
        feed.gauge("mizzen_phase_duration_seconds").set(health.phase_s)
        feed.gauge("mizzen_engine_load_duration_seconds").set(policy.engine_load_s)
        ages = policy.heartbeat_ages_s(now)
        for name, state in health.processes.items():
            if name != "prepare":  # it ends by design
                feed.gauge("mizzen_process_ready", name).set(state == "ready")
                feed.gauge("mizzen_process_heartbeat_age_seconds", name).set(ages.get(name, 0.0))
        for name, restarts in policy.restarts.items():
            feed.counter("mizzen_process_restarts_total", name).add(restarts - self._restarts.get(name, 0))
            self._restarts[name] = restarts
        feed.flush()
