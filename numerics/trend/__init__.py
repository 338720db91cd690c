"""Trends of monitored tensors over steps: anomalies, their attribution, and a page. Needs numpy only."""
