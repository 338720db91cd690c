"""One GPT-2 training run: knows of no variant and no study."""
