"""`python -m packlora ...` and `torchrun -m packlora ...`: the same as the `packlora` command."""

from packlora.cli import command

command()
