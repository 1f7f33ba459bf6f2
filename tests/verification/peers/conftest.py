"""A backend of one rank for the tests of peers."""

from __future__ import annotations

from tests.support.backends import shared
from verification.run.backends import GlooBackend

backend = shared(GlooBackend, 1)
