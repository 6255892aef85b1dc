"""Figures of TISED sweeps."""
