"""What rounding explains: one unit, replayed calls, checks of operations and optimizers."""
