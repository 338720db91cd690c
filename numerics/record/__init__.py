"""Record what the steps of a program compute."""
