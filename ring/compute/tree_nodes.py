"""Sums over a binary tree of numbered parts, whatever the order in which they come: `ring.plan.tile.Node`.

A node waits for its sibling; so a tree holds few nodes at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ring.plan.tile import Node

T = TypeVar("T")


@dataclass(eq=False)
class TreeNodes(Generic[T]):
    """The nodes of a tree that are complete, and wait for their siblings.

    parts: their number; None: not known yet. combine: of the left node and the right.
    """

    parts: int | None
    combine: Callable[[T, T], T]
    waiting: dict[Node, T] = field(default_factory=dict)
    root: T | None = None

    def insert(self, node: Node, value: T) -> None:
        """Add a complete node: combine it with its sibling, and so on upwards, as far as siblings are complete."""
        while self.parts is None or not node.is_root(self.parts):
            if self.parts is None or not node.is_alone(self.parts):
                if node.sibling not in self.waiting:
                    self.waiting[node] = value
                    return
                other = self.waiting.pop(node.sibling)
                value = self.combine(other, value) if node.number % 2 else self.combine(value, other)
            node = node.parent
        self.root = value

    def take(self, node: Node) -> T:
        """Return a node that waits, or the root."""
        if self.parts is not None and node.is_root(self.parts):
            assert self.root is not None
            return self.root
        return self.waiting[node]

    def close(self, parts: int) -> T:
        """Return the root of so many parts, all of which were inserted."""
        waiting, self.waiting, self.parts = self.waiting, {}, parts
        for node, value in sorted(waiting.items(), key=lambda entry: entry[0].number << entry[0].level):
            self.insert(node, value)
        assert self.root is not None and not self.waiting
        return self.root
