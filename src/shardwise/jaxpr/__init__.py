"""Everything that imports jax: capture of jaxprs, the OpRunner, and the program that runs sharded."""
