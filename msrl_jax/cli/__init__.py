"""The command line, `msrl-jax`."""

from msrl_jax.cli.command_line import main as main
