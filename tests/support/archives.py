"""Which archives this Python can unpack."""

from __future__ import annotations

import tarfile

import pytest

unpacks_tar = pytest.mark.skipif(
    not hasattr(tarfile, "data_filter"), reason="Python before 3.11.4 cannot unpack tar archives safely"
)
