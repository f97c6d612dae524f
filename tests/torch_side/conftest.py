"""What the tests of compiled calls share."""

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo counts recompilations per code object, across tests. Calls are without grad."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own code, which this may be the first to import
        torch._dynamo.reset()
    with torch.no_grad():
        yield
