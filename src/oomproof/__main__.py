"""``python -m oomproof`` is ``oomproof``."""

from oomproof.cli import main

main()
