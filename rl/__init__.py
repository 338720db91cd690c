"""GRPO with noise in the rollout alone: training by TRL (extra `rl`), records, verdicts, page."""
