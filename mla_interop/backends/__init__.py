"""The backends: one file per kernel family, and ``registry`` with the only list of them."""
