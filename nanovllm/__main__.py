"""`python -m nanovllm`: the command line."""

from nanovllm.cli import main

main()
