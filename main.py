"""`python main.py --help` says what there is to do; everything is in `adaptive_span_jax/cli.py`."""

from adaptive_span_jax.cli import main

if __name__ == "__main__":
    main()
