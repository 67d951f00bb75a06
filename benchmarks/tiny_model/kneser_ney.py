"""A byte-level interpolated modified Kneser-Ney model, the reference that the tiny model has to beat.

See Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling" (1998). Every order
interpolates with the next shorter one, down to the uniform distribution over the 256 bytes. The longest order counts
occurrences, the shorter ones count distinct left neighbours. Each order has three discounts of its own, estimated from
its counts of counts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]

# Documents are preceded by start symbols, which occur in contexts but are never predicted.
START = 256
SYMBOLS = 257
# The n-grams are numbers in base 257, and these are the longest that fit into 63 bits.
MAX_ORDER = 7
# Used where an order is too small for the estimate, as single bytes are in a small corpus.
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class _Order:
    """The counts of one n-gram length, and for each context what they discount.

    Attributes:
      grams: The n-grams, sorted.
      gains: For each n-gram, its discounted count.
      contexts: The n-grams without their last byte, sorted.
      totals: For each context, the sum of its counts before discounting.
      freed: For each context, the sum of what was discounted: the weight of the shorter order.
    """

    grams: Keys
    gains: NDArray[np.float64]
    contexts: Keys
    totals: NDArray[np.float64]
    freed: NDArray[np.float64]


def _discounts(counts: Keys) -> tuple[float, float, float]:
    """Estimates the discounts of the n-grams that were counted once, twice, and three times or more."""
    n1, n2, n3, n4 = (int((counts == occurrences).sum()) for occurrences in (1, 2, 3, 4))
    if 0 in (n1, n2, n3, n4):
        return FALLBACK_DISCOUNTS
    ratio = n1 / (n1 + 2 * n2)
    estimates = (1 - 2 * ratio * n2 / n1, 2 - 3 * ratio * n3 / n2, 3 - 4 * ratio * n4 / n3)
    if any(not 0 < estimate < limit for estimate, limit in zip(estimates, (1, 2, 3), strict=True)):
        return FALLBACK_DISCOUNTS
    return estimates


def _order(grams: Keys, counts: Keys) -> _Order:
    discounts = np.array((0.0, *_discounts(counts)))[np.minimum(counts, 3)]
    contexts, first = np.unique(grams // SYMBOLS, return_index=True)
    return _Order(
        grams=grams,
        gains=counts - discounts,
        contexts=contexts,
        totals=np.add.reduceat(counts, first).astype(np.float64),
        freed=np.add.reduceat(discounts, first),
    )


def _find(table: Keys, keys: Keys) -> tuple[Keys, NDArray[np.bool_]]:
    """Returns where each key is in a sorted table, and whether it is there at all."""
    places = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return places, table[places] == keys


class KneserNey:
    """The probability of the next byte given the bytes before it, ``order - 1`` of them."""

    def __init__(self, documents: list[bytes], order: int = 5) -> None:
        """Counts the n-grams of the training documents; the context of a document's first bytes is its start."""
        if not 1 <= order <= MAX_ORDER:
            raise ValueError(f"the order must be from 1 to {MAX_ORDER}")
        self.order = order
        grams, counts = np.unique(np.concatenate([self._grams(document) for document in documents]), return_counts=True)
        orders = [_order(grams, counts)]
        for length in range(order - 1, 0, -1):
            grams, counts = np.unique(grams % SYMBOLS**length, return_counts=True)
            orders.append(_order(grams, counts))
        self._shortest_first = orders[::-1]

    def _grams(self, document: bytes) -> Keys:
        """Returns the n-gram that ends in each byte of a document."""
        symbols = np.full(self.order - 1 + len(document), START, dtype=np.int64)
        symbols[self.order - 1 :] = np.frombuffer(document, dtype=np.uint8)
        grams = np.zeros(len(document), dtype=np.int64)
        for offset in range(self.order):
            grams = grams * SYMBOLS + symbols[offset : offset + len(document)]
        return grams

    def _probabilities(self, grams: Keys) -> NDArray[np.float64]:
        """Returns the probability of each n-gram's last byte after the others."""
        result = np.full(len(grams), 1 / 256)
        for length, counts in enumerate(self._shortest_first, start=1):
            suffixes = grams % SYMBOLS**length
            places, seen = _find(counts.grams, suffixes)
            contexts, known = _find(counts.contexts, suffixes // SYMBOLS)
            gains = np.where(seen, counts.gains[places], 0.0)
            interpolated = (gains + counts.freed[contexts] * result) / counts.totals[contexts]
            result = np.where(known, interpolated, result)
        return result

    def nats(self, document: bytes) -> float:
        """Returns the negative log-likelihood of a whole document, in nats."""
        return float(-np.log(self._probabilities(self._grams(document))).sum())

    def check(self, documents: list[bytes], contexts: int = 2000, seed: int = 0) -> None:
        """Asserts that the 256 probabilities after a context sum to 1, for contexts of documents and random ones."""
        random = np.random.default_rng(seed)
        grams = np.concatenate([self._grams(document) for document in documents])
        from_documents = random.choice(grams, contexts) // SYMBOLS
        at_random = random.integers(0, SYMBOLS ** (self.order - 1), contexts)
        for context in np.concatenate([from_documents, at_random]):
            total = self._probabilities(context * SYMBOLS + np.arange(256)).sum()
            if abs(total - 1) > 1e-9:
                raise AssertionError(f"the probabilities after context {context} sum to {total}")
