"""How to run each higher-order primitive of JAX's with sows inside."""

from . import calls, control_flow  # noqa: F401
