"""The second worker: GRPO of a language model with noise in the rollout."""
