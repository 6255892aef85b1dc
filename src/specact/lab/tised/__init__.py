"""Levers pulled in the moving world: sweeps over them, and what they bought at which price."""
