"""Adaptive Quantization Noise (QeRL): noise on the weights of norms during training."""
