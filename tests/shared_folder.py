"""A folder that all processes of one test session share: data of studies, and the saved examinations beside them."""

import os
from pathlib import Path

VARIABLE = "TESTS_SHARED_FOLDER"


def data_folder() -> dict[str, str]:
    """Return the setting that places the data of a study in the session's folder; none outside of a session.

    The data of other texts lie in another subfolder, and a variant is examined once for each shape and source.
    """
    folder = os.environ.get(VARIABLE)
    return {"DATA_DIR": str(Path(folder, "data"))} if folder else {}
