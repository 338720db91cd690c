"""logp_diff: log-probabilities of rollout against those of training, section 2.3.3.5."""

from numerics.logp.diff import LogpDiff, logp_diff

__all__ = ["LogpDiff", "logp_diff"]
