"""Exchange with Hugging Face's transformers: weights, configuration and tokenizer files."""
