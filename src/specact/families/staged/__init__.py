"""Split targets: the first stages run on a server, the others on the device."""
