"""The command line, `msrl-jax`."""

from msrl_jax.cli.entry_point import main as main
