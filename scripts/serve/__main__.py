"""`make serve [STUDY=results/x] [PORT=8765]`: watch a study in a browser on this machine, read-only.

python -m scripts.serve [STUDY_DIR] --port N
"""

from __future__ import annotations

from configuration.arguments import make_variables
from gpt2.system.errors import UserError, run_command
from scripts.report import study_directory
from scripts.serve.server import StudyServer

PORT = "8765"


def port_number(text: str) -> int:
    """Return a port. UserError for other text; 0 lets the system choose one."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise UserError(f"PORT={text} is not a port; fix: PORT={PORT}, or another from 1024 to 65535")
    return int(text)


def main() -> int:
    server = StudyServer(study_directory("serve"), port_number(make_variables().get("PORT", PORT)))
    print(f"{server.study_dir} at {server.url}  (this machine only; Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped")
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    run_command(main)
