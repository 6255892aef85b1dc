"""Targets in stages: the first of them on a server, the others on the device."""
