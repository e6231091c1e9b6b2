"""One zygote and one set of saved runs for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.jobs.kill.zygote import Zygote
from tests.jobs.parallel.matrix import Matrix


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    """Starts trainings on any mesh."""
    zygote = Zygote("tests.jobs.parallel.rank")
    matrix = Matrix(zygote, tmp_path_factory.mktemp("matrix"))
    yield matrix
    zygote.close()
    matrix.close()
