"""What is released, built once."""

import pytest
from released import ROOT, Release, build


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The wheel and the sdist of this checkout."""
    return build(ROOT, tmp_path_factory.mktemp("release"))
