"""The main job on real input: one attention layer of a real model's geometry, on real text, from both frameworks.

``layer.py`` makes q, k and v with the model's own code, ``paths.py`` computes the prefill in every way there is here and
measures each against float64, ``report.py`` shows it. Needs the ``demo`` extra; the core imports none of this.
"""
