"""Monitor a training run: statistics of weights, gradients, optimizer state and activations, section 4.6."""
