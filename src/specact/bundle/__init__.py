"""Bundles: folders of networks and tensors, with a manifest that says what they are."""
