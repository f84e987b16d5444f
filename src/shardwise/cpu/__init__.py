"""What makes CPUs good training machines."""
