"""The attentions under study. A variant name selects the attention of each layer."""
