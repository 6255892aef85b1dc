"""Placement of a target's stages on server and device, adapted to the link."""
