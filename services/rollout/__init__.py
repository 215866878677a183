"""Rollout: leases prompts, samples answers with an engine, scores and reports them."""
