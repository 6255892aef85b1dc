"""Pictures of sweeps in the moving world."""
