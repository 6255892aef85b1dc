"""The studies behind the pages of docs/: each a plan of cells, stored results, and the page that is written from them.

Not part of the package: ``python -m experiments`` in a checkout lists them.
"""
