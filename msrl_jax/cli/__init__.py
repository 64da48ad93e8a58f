"""The command line, `msrl-jax`."""

from msrl_jax.cli.program import main as main
