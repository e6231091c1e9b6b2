"""Commands that decide without a job: plan, policy, redundancy, simulate, windows."""
