"""Where a target's stages run: the first of them on a server, the others on the device, as the link allows."""
