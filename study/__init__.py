"""Many runs: the plan, the order, the statistics and the report."""
