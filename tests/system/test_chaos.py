"""A short chaos run with a fixed seed: the same engine, faults and proofs as `make chaos`, about a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos_plan import MESSAGE_KINDS
from tests.system import chaos

NUM_FAULTS = 40
LIMIT_S = 400.0
"""Generous: a hang ends the run by itself."""


@pytest.mark.timeout(LIMIT_S)
async def test_under_forty_faults_nothing_is_lost_nothing_trained_twice_and_nothing_hangs(tmp_path: Path) -> None:
    found = await chaos.run(tmp_path / "run", seed=11, num_faults=NUM_FAULTS, gap_s=1.0)
    assert found.failures == []
    assert (found.lost, found.doubled, found.hangs) == (0, 0, 0)
    assert found.prompts_trained == found.steps * 4
    assert found.max_lag_trained <= found.max_lag_bound == 2
    assert found.faults >= NUM_FAULTS
    assert found.verified >= 2
    process_faults = sum(n for kinds in found.by_kind.values() for kind, n in kinds.items() if kind not in MESSAGE_KINDS)
    assert process_faults >= NUM_FAULTS // 4
