"""TISED's levers in the moving world: sweeps and their analysis."""
