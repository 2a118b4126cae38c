"""Tests with each supported release of JAX. CONTRIBUTING.md says how to run them."""

import nox


nox.needs_version = ">=2024.10.9"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

# The releases of JAX, and a Python for each: one that CI has, too.
RELEASES = {
    "0.10.2": "3.11",
    "0.11.0": "3.13",
    "0.11.1": "3.13",
    "0.11.2": "3.13",
    "0.12.0": "3.13",
    "0.12.0.1": "3.13",
}
OLDEST = next(iter(RELEASES))


@nox.session
@nox.parametrize("python,jax", [nox.param(p, j, id=j) for j, p in RELEASES.items()])
def tests(session: nox.Session, jax: str) -> None:
    """The tests, with one release of JAX. What comes after `--` goes to pytest."""
    # With the oldest JAX, everything else that eqx_sow needs is as old as it may be.
    others = ["-c", "tests/constraints-oldest.txt"] if jax == OLDEST else []
    session.install("-e", ".[test]", f"jax=={jax}", *others)
    session.run("python", "-m", "pytest", *session.posargs)
