"""Walking: the interpreter, its rules, and the rules of JAX that are wrapped."""
