"""Check a card in ten minutes: kernels, gradients, a stopped study, memory, the time budget and the speed."""
