"""The framework-free program: placements, the graph and its text form, liveness, and the OpRunner protocol."""
