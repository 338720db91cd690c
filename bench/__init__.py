"""Measure speed, memory and cost of training: suites that compare cases in interleaved rounds."""
