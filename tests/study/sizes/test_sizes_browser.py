"""sizes.html in a real browser: nothing goes wrong, the effects are drawn, nothing overflows a phone."""

import shutil
from pathlib import Path

import pytest

from study.sizes.write import write_sizes
from tests.study.browser import BROWSER, faultless
from tests.study.sizes.test_sizes_page import several

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")]


@pytest.mark.parametrize("phone", [False, True])
def test_the_effects_are_drawn_and_fit(tmp_path: Path, phone: bool) -> None:
    directory = several(tmp_path, {"tiny": -0.05, "mini": -0.03, "small": -0.01})
    write_sizes(directory, ("tiny", "mini", "small"))
    shutil.copy(directory / "sizes.html", directory / "report.html")
    faultless(directory, phone=phone)
