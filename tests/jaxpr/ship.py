"""Rewrites the book of JAX rules that ships with the package: those of the models here, found anew.

python -m tests.jaxpr.ship
"""

from __future__ import annotations

import sys

import jax

from shardwise.ir.graph import Graph
from shardwise.jaxpr import views
from shardwise.jaxpr.capture import capture
from shardwise.jaxpr.rules import jax_book, rules_of_graph
from shardwise.rules.book import shipped_name, write_rules
from shardwise.rules.ship import SHIPPED

from .models import MODELS, Case, adamw, gpt, sgd


def _graph(case: Case) -> Graph:
    step, example = case
    return capture(step, example).graph


def main() -> None:
    """Neither the cache nor a book is read."""
    jax.config.update("jax_enable_x64", True)
    book = jax_book(use_disk=False, use_shipped=False)
    for optimizer in (adamw(), sgd()):
        for name, model in MODELS.items():
            rules_of_graph(_graph(model(optimizer)), book)
            print(f"{name}: {len(book.rules)} rules so far", file=sys.stderr, flush=True)
        rules_of_graph(_graph(gpt(optimizer, remat=True)), book)
    jax.config.update("jax_enable_x64", False)
    for name, model in MODELS.items():
        rules_of_graph(_graph(model(adamw(), dtype="float32")), book)
        print(f"{name} in float32: {len(book.rules)} rules so far", file=sys.stderr, flush=True)
    (SHIPPED / views._path().name).write_text(views.printed_views() + "\n", encoding="utf-8")
    path = SHIPPED / shipped_name(book.runner.framework)
    path.write_text(write_rules(book.rules, book.runner.framework) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
