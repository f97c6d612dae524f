"""What the tests of compiled calls share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo counts recompilations per code object, across tests. Calls are without grad."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    with torch.no_grad():
        yield
