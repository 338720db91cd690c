"""Replace the computation of chosen modules and functions without editing the model (section 2.4.2 of the guide)."""
