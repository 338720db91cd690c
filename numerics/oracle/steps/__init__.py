"""Steps of optimizers: recorded beside the operations of a step, and checked against float64."""
