"""Build what `pip install .` installs: numerics, with pages inside it as numerics.pages.

The trainer is not installed: `make` runs it from the checkout. `pages` would be a top-level name that another package
may have, so the installed copy is a part of numerics, and the imports of the built files say so.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

IMPORT = re.compile(r"^(\s*(?:from|import) )pages\b", re.MULTILINE)


class BuildPackages(build_py):
    """Copy the packages, and change `from pages` to `from numerics.pages` in the copies."""

    def build_module(self, module: str, module_file: str, package: str) -> object:
        built = super().build_module(module, module_file, package)
        target = Path(self.get_module_outfile(self.build_lib, package.split("."), module))
        target.write_text(
            IMPORT.sub(r"\1numerics.pages", target.read_text(encoding="utf-8")), encoding="utf-8"
        )
        return built


setup(
    packages=[*find_packages(include=["numerics", "numerics.*"]), "numerics.pages"],
    package_dir={"numerics.pages": "pages"},
    package_data={"": ["*.css", "*.js", "*.json", "*.md", "LICENSE", "*/*.gz", "*/*.md", "*/LICENSE"]},
    cmdclass={"build_py": BuildPackages},
)
