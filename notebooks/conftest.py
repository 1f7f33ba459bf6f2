"""`pytest --nbmake notebooks`: kernels are reached by socket files. nbmake has no option for it."""

from __future__ import annotations

from functools import partial

import pytest
from nbmake import nb_run

from notebooks.kernels import SocketFileKernelManager


def pytest_configure(config: pytest.Config) -> None:
    nb_run.NotebookClient = partial(nb_run.NotebookClient, kernel_manager_class=SocketFileKernelManager)
