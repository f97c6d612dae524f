"""For people who look: compare backends, see attention, profile LSE, take times; in a notebook or anywhere else.

Arrays are torch's, JAX's or NumPy's alike. What comes back shows itself as a table (``_repr_html_``, ``print``), gives its numbers
(``rows``, ``to_dict()``, ``to_dataframe()``), and draws itself (``plot()``, a matplotlib Figure that no global state knows).
"""

from mla_interop.explore.attention import AttentionMap as AttentionMap
from mla_interop.explore.attention import attention_map as attention_map
from mla_interop.explore.choice import Choices as Choices
from mla_interop.explore.choice import choices as choices
from mla_interop.explore.comparison import Comparison as Comparison
from mla_interop.explore.comparison import compare as compare
from mla_interop.explore.profile import LSEProfile as LSEProfile
from mla_interop.explore.profile import lse_profile as lse_profile
from mla_interop.explore.speed import Timing as Timing
from mla_interop.explore.speed import load_results as load_results
from mla_interop.explore.speed import timing as timing

__all__ = ["AttentionMap", "Choices", "Comparison", "LSEProfile", "Timing", "attention_map", "choices", "compare", "load_results", "lse_profile", "timing"]
