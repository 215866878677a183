"""The plan of the chaos suite is what it says: decided by the seed, over all kinds and services."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from stretto.v1 import scheduler_pb2, weightsync_pb2
from tests.chaos_plan import MESSAGE_KINDS, METHODS, PROCESS_FAULTS, Fault, faults

LEASE_S = 3.0


def first(n: int, seed: int = 0) -> list[Fault]:
    return list(islice(faults(seed, gap_s=1.5, lease_s=LEASE_S), n))


def test_a_seed_decides_the_plan_and_another_one_decides_otherwise() -> None:
    assert first(200, 7) == first(200, 7)
    assert first(200, 7) != first(200, 8)


def test_a_thousand_faults_hold_every_kind_on_every_target_and_at_least_a_third_befall_processes() -> None:
    plan = first(1000)
    assert {(f.kind, f.target) for f in plan if not f.is_message} == {(kind, target) for kind, target, _ in PROCESS_FAULTS}
    assert {(f.kind, f.target) for f in plan if f.is_message} == {(k, t) for k in MESSAGE_KINDS for t in ("scheduler", "weightsync")}
    assert sum(not f.is_message for f in plan) > 333


def test_the_faults_come_as_often_as_asked_for() -> None:
    plan = first(2000)
    assert 1.4 < sum(f.after_s for f in plan) / len(plan) < 1.6


def test_a_stop_ends_within_the_lease_and_a_freeze_outlasts_it() -> None:
    lengths = Counter((f.kind, f.length_s > LEASE_S) for f in first(3000) if f.kind in ("stop", "freeze", "double"))
    assert set(lengths) == {("stop", False), ("freeze", True), ("double", True)}


def test_only_methods_that_the_services_have_are_disturbed() -> None:
    services = {"scheduler": scheduler_pb2, "weightsync": weightsync_pb2}
    names = {"scheduler": "SchedulerService", "weightsync": "WeightSyncService"}
    for service, method, _ in METHODS:
        assert method in services[service].DESCRIPTOR.services_by_name[names[service]].methods_by_name
