"""Small models that several tests of the runtime share; nobody changes them."""

from __future__ import annotations

import pytest

from tests.support.small_models import Small, make_encoded, make_small


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_encoded(tmp_path_factory.mktemp("encoded"))
