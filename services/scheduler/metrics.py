"""What the scheduler measures, for /metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.scheduler.groups import OPEN_STATES, Kind, State, View

GROUPS = Gauge("stretto_scheduler_groups", "Prompt groups by state", ["state"])
VALIDATION_GROUPS = Gauge("stretto_scheduler_validation_groups", "Validation groups that have not ended")
OCCUPIED = Gauge("stretto_scheduler_occupied_groups", "Groups that occupy the window: everything not yet trained")
WINDOW = Gauge("stretto_scheduler_window_groups", "Groups that may be un-trained at once")
COMMITTED_STEP = Gauge("stretto_scheduler_committed_step", "Newest committed step = newest published version")
CHECKPOINT_STEP = Gauge("stretto_scheduler_checkpoint_step", "Newest step a durable checkpoint contains")
CURSOR = Gauge("stretto_scheduler_cursor_prompts", "Dataset ordinals that have entered")
TRAINER_EPOCH = Gauge("stretto_scheduler_trainer_epoch", "Incarnation of the trainer")
EPOCH = Gauge("stretto_scheduler_epoch", "Incarnation of this scheduler")
REPLICAS = Gauge("stretto_scheduler_replicas", "Rollout replicas that are there")
LEASES = Gauge("stretto_scheduler_leases_groups", "Groups on lease, validation included")
COMPLETIONS_PER_S = Gauge("stretto_scheduler_completions_per_second", "Trajectories reported per second, recent mean")

TRAJECTORIES = Counter("stretto_scheduler_trajectories_total", "Trajectories reported", ["outcome"])
EVICTED = Counter("stretto_scheduler_evicted_groups_total", "Groups that left untrained", ["reason"])
REISSUED = Counter("stretto_scheduler_lost_leases_total", "Leases that ended without a report", ["reason"])
LOST_REPORTS = Counter("stretto_scheduler_lost_reports_total", "Reported groups whose lease was no longer the replica's")
LAG = Histogram(
    "stretto_scheduler_lag_versions", "Trainer version minus the version that began the group", buckets=(0, 1, 2, 3, 4, 6, 8, 16, 32)
)
LEASE_WAIT_S = Histogram(
    "stretto_scheduler_lease_wait_seconds",
    "Long poll of LeasePrompts until its grant",
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30),
)
BATCH_WAIT_S = Histogram(
    "stretto_scheduler_batch_wait_seconds", "SampleBatch until its batch", buckets=(0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
)
RPC_S = Histogram(
    "stretto_scheduler_rpc_seconds",
    "Handling of a call, waits excluded where the method is no long poll",
    ["method"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30),
)


def observe(view: View) -> None:
    """Set the gauges that a snapshot determines."""
    for state in State:
        GROUPS.labels(state.value).set(view.occupancy.get(state, 0))
    VALIDATION_GROUPS.set(sum(view.occupancy.get(f"validation:{state}", 0) for state in (State.PENDING, State.RUNNING)))
    OCCUPIED.set(sum(view.occupancy.get(state, 0) for state in OPEN_STATES))
    WINDOW.set(view.run.window)
    COMMITTED_STEP.set(view.run.committed)
    CHECKPOINT_STEP.set(view.run.checkpoint)
    CURSOR.set(view.run.cursor)
    TRAINER_EPOCH.set(view.run.trainer_epoch)
    LEASES.set(view.occupancy.get(State.RUNNING, 0) + view.occupancy.get(f"{Kind.VALIDATION.name.lower()}:{State.RUNNING}", 0))
