"""`python -m cuflash` is the `cuflash` command."""

from cuflash.cli import main

main()
