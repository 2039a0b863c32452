"""`python -m effcli` is the same as `effcli`."""

from __future__ import annotations

from effcli.cli.app import main

if __name__ == "__main__":
    main()
