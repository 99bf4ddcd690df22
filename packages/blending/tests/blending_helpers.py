"""The order of spec version 1 said a second time, slowly: loops, lists and Python integers, nothing shared.

Tests compare the package with these; they also hold the toy sources and tokenizers.
"""

import heapq
from fractions import Fraction
from hashlib import blake2b

import numpy as np

from sixfold.blending import BlendedDataset, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.samples import document_shuffle as shuffled
from sixfold.blending.source import ListSource

WORD = 2**64 - 1
EOD = 0


class Tokenizer:
    """What gpt hands over: eod 0, ids below 256."""

    eod = EOD
    vocab_size = 256
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012


class LargeTokenizer(Tokenizer):
    """With a vocabulary for ids that count all tokens of a dataset."""

    vocab_size = 2**31


def naive_key(*parts):
    digest = blake2b(b"\x1f".join(str(part).encode() for part in ("sixfold-order-1", *parts)), digest_size=8).digest()
    return sum(byte << (8 * number) for number, byte in enumerate(digest))


def naive_mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def naive_permute(key, n, index):
    b = max(1, -(-(n - 1).bit_length() // 2))
    while True:
        left, right = divmod(index, 2**b)
        for r in range(6):
            round_key = naive_mix((key + (r + 1) * 0x9E3779B97F4A7C15) & WORD)
            left, right = right, left ^ (naive_mix(right ^ round_key) % 2**b)
        index = left * 2**b + right
        if index < n:
            return index


def naive_quotas(weights, total=2**31):
    exact = [Fraction(weight) * total / sum(map(Fraction, weights)) for weight in weights]
    quotas = [int(share) for share in exact]
    for number in sorted(range(len(exact)), key=lambda i: (quotas[i] - exact[i], i))[: total - sum(quotas)]:
        quotas[number] += 1
    return quotas


def naive_blend(quotas, positions):
    """(dataset, sample) of positions 0, 1, ... one after the other: every node counts what came by."""
    D = len(quotas)
    heap = [(quota, number, None) for number, quota in enumerate(quotas) if quota]
    heapq.heapify(heap)
    fresh = D
    while len(heap) > 1:
        small, large = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (small[0] + large[0], fresh, (large, small)))
        fresh += 1
    seen: dict[int, int] = {}
    found = []
    for _ in range(positions):
        node = heap[0]
        while node[2] is not None:
            n, number, (left, right) = node
            m = seen.get(number, 0)
            seen[number] = m + 1
            nearest = [int(Fraction(k * left[0], n) + Fraction(1, 2)) for k in (m, m + 1)]
            node = left if nearest[1] > nearest[0] else right
        sample = seen.get(node[1], 0)
        seen[node[1]] = sample + 1
        found.append((node[1], sample))
    return found


class NaiveLine:
    """One dataset's line of tokens as a list per epoch, and its samples taken one after the other."""

    def __init__(self, lengths, S, seed=1234, name="a", part="train", window=65_536, shuffle="block"):
        self.shuffle = shuffle
        self.lengths, self.S, self.names, self.window = lengths, S, (seed, name, part), window
        self.T = sum(lengths)
        self.grid, self.origin, self.taken = 0, 0, 0
        self.string, self.resume, self.epochs = [], 0, {}
        self.chunks, self.orders = {}, {}  # kept only because loops are slow

    def epoch(self, e):
        """[(sequence, offset)] of epoch e."""
        if e not in self.epochs:
            n = len(self.lengths)
            B = 1 if self.shuffle == "global" else min(256, max(1, n // 1024))
            blocks = -(-n // B)
            tokens = []
            for place in range(blocks):
                block = naive_permute(naive_key(*self.names, e), blocks, place)
                size = min(B, n - block * B)
                for j in range(size):
                    sequence = block * B + naive_permute(naive_key(*self.names, e, block), size, j)
                    tokens += [(sequence, offset) for offset in range(self.lengths[sequence])]
            self.epochs[e] = tokens
        return self.epochs[e]

    def token(self, t):
        """(epoch, sequence, offset) of token t of the line."""
        e, rest = divmod(t, self.T)
        return (e, *self.epoch(e)[rest])

    def _window(self, index):
        """(chunk numbers in reading order, place of ``index`` among them) of the window that holds it."""
        e = (self.origin + index * self.S) // self.T
        here = (self.grid, self.origin, e)
        if here not in self.chunks:
            self.chunks[here], k = [], 0
            while self.origin + k * self.S < (e + 1) * self.T:
                if self.origin + k * self.S >= e * self.T:
                    self.chunks[here].append(k)
                k += 1
        number, place = divmod(index - self.chunks[here][0], self.window)
        if (*here, number) not in self.orders:
            chunks = self.chunks[here][number * self.window : (number + 1) * self.window]
            key = naive_key(*self.names, self.grid, e, number)
            self.orders[*here, number] = [chunks[naive_permute(key, len(chunks), i)] for i in range(len(chunks))]
        return self.orders[*here, number], place

    def take(self):
        """Pieces of the next sample: lists of consecutive line positions."""
        if self.string:
            sample, self.string = self.string[: self.S], self.string[self.S :]
            missing = self.S - len(sample)
            sample += [(self.resume + i, "tail") for i in range(missing)]
            if not self.string:
                self.origin, self.taken = self.resume + missing, 0
            pieces, last = [], None
            for position, chunk in sample:
                if chunk != last:
                    pieces.append([])
                pieces[-1].append(position)
                last = chunk
            return pieces
        order, place = self._window(self.taken)
        self.taken += 1
        begin = self.origin + order[place] * self.S
        return [list(range(begin, begin + self.S))]

    def change(self, S):
        if not self.string:
            order, place = self._window(self.taken)
            if place:
                for k in order[place:]:
                    self.string += [(self.origin + k * self.S + i, (self.grid, k)) for i in range(self.S)]
                self.resume = self.origin + (max(order) + 1) * self.S
            else:
                self.origin += self.taken * self.S
        self.S, self.grid, self.taken = S, self.grid + 1, 0


def sequences_of(lengths, seed=0, eod_every=0):
    """Sequences of random ids 1..255, or the running number of every token if they are to be told apart."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(1, 256, length).tolist() for length in lengths]
    if eod_every:
        for number, sequence in enumerate(made):
            if sequence and number % eod_every == 0:
                sequence[-1] = EOD
    return made


def numbered(lengths, begin=1):
    """Sequences whose ids count through all tokens, so that an id says where it came from."""
    ends = begin + np.cumsum(lengths)
    return [list(range(end - length, end)) for end, length in zip(ends.tolist(), lengths, strict=True)]


def config(**fields):
    base = {"random_seed": 1234, "sequence_length": 8, "tokenizer": LargeTokenizer(), "max_epochs": None}
    return GPTDatasetConfig(**(base | fields))


def dataset(sequences, num_samples=1000, name="a", split=Split.train, cls=GPTDataset, **fields):
    return cls(ListSource(sequences), name, range(len(sequences)), num_samples, split, config(**fields))


def blend(named_sequences, weights=None, size=1000, **fields):
    """A blend of {name: sequences}; every part takes all sequences."""
    made = config(**fields)
    parts = [
        GPTDataset(ListSource(sequences), name, range(len(sequences)), None if size is None else 0, Split.train, made)
        for name, sequences in named_sequences.items()
    ]
    return BlendedDataset(parts, weights, size, made)


def shuffle_as_a_whole(monkeypatch, group=4):
    """Have documents permuted as a whole also where a block has one document anyway, by the code of large parts.

    Below 2,048 documents both shuffles are one order (``NaiveLine`` says the same of both), and only one code is used.
    """
    monkeypatch.setattr(shuffled, "block_size", lambda documents: 2)
    monkeypatch.setattr(shuffled, "_GROUP", group)
    monkeypatch.setattr(shuffled, "_SLOTS_AT_LEAST", 1)
    monkeypatch.setattr(shuffled.GloballyShuffledLine, "_slots_at_least", 1)


class ListDataset(GPTDataset):
    """Opens the prefixes of ``pairs`` from memory, so that the builder runs without files."""

    pairs: dict[str, ListSource] = {}  # noqa: RUF012

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        return ListDataset.pairs[dataset_path]


def write_pair(prefix, lengths):
    """A pair of documents of these lengths; all ids are 7."""
    from sixfold.indexed_data import IndexedDatasetBuilder  # which blending's tests may lack

    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for length in lengths:
            builder.add_document([7] * length)
