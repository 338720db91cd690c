"""Imported GPT-2 weights: a run to evaluate (`make import`), and the start of a study (CONFIG_INIT_FROM)."""
