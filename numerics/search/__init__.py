"""Replace computations of a model, and search for the smallest replacement that removes a symptom (section 2.4.2)."""
