"""`python -m msrl_jax` is `msrl-jax`."""

from msrl_jax.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
