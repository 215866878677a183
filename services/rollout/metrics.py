"""What a replica measures, for /metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

TOKENS = Counter("stretto_rollout_tokens_total", "Tokens drawn since the process began")
TRAJECTORIES = Counter("stretto_rollout_trajectories_total", "Trajectories acknowledged by the scheduler", ["finish"])
RUNNING = Gauge("stretto_rollout_running_sequences", "Sequences the engine is generating")
WAITING = Gauge("stretto_rollout_waiting_sequences", "Sequences that wait for a slot")
SLOTS = Gauge("stretto_rollout_slots_sequences", "Sequences the engine can generate at once")
ENDED = Gauge("stretto_rollout_unreported_trajectories", "Trajectories that await a score or an acknowledgement")
LEASES = Gauge("stretto_rollout_leases_groups", "Leases held")
BUSY_SHARE = Gauge("stretto_rollout_busy_ratio", "Share of the last seconds the engine spent stepping")
VERSION = Gauge("stretto_rollout_held_version", "Policy version in use; -1 before the first")
TRAINER_EPOCH = Gauge("stretto_rollout_held_trainer_epoch", "Trainer epoch of the weights in use; 0 before the first")
UPDATES = Counter("stretto_rollout_weight_updates_total", "Weight updates loaded")
UPDATE_FAILURES = Counter("stretto_rollout_weight_update_failures_total", "Fetches or loads that failed; the old version stayed")
UPDATE_STALL_MS = Histogram(
    "stretto_rollout_weight_update_stall_ms",
    "Engine standstill per weight update",
    buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000),
)
REWARD_S = Histogram(
    "stretto_rollout_reward_batch_seconds", "Scoring of one batch of answers", buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30)
)
REWARD_FAILURES = Counter("stretto_rollout_reward_failures_total", "Answers whose scoring failed")
ENGINE_DEATHS = Counter("stretto_rollout_engine_deaths_total", "Times the engine raised and was built anew")
