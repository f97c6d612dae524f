"""One benchmark harness: every contender of both frameworks on the same inputs in one run, results as JSON."""
