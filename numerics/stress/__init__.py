"""Find a faulty device by golden computations, on each device alone and on all together (section 2.3.2.3)."""
