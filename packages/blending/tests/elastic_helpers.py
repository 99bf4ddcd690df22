"""A run whose every part changes, as the spec states it: dataset, chunk and tokens, position by position.

Python integers and lists, nothing of the package. ``Stated`` walks forward and is asked once for each position.
"""

from blending_helpers import naive_key, naive_permute, naive_quotas


def walk(quotas):
    """Datasets of positions 0, 1, ...: a Huffman tree of the quotas, at each node the nearest share goes left."""
    nodes = [(quota, number, None) for number, quota in enumerate(quotas) if quota]
    fresh = len(quotas)
    while len(nodes) > 1:
        nodes.sort(key=lambda node: node[:2])
        small, large = nodes.pop(0), nodes.pop(0)
        nodes.append((small[0] + large[0], fresh, (large, small)))
        fresh += 1
    seen = {}
    while True:
        total, number, children = nodes[0]
        while children is not None:
            m = seen.get(number, 0)
            seen[number] = m + 1
            left = [(2 * items * children[0][0] + total) // (2 * total) for items in (m, m + 1)]
            total, number, children = children[int(left[1] == left[0])]
        yield number


class StatedLine:
    """The samples of one dataset, one after the other, each as stretches (begin, length) of its line of tokens."""

    def __init__(self, lengths, sequence_length, names, window, shuffle):
        self.shuffle = shuffle
        self.lengths, self.tokens, self.names, self.window = lengths, sum(lengths), names, window
        self.S, self.grid, self.origin, self.taken = sequence_length, 0, 0, 0
        self.left_over, self.behind = [], 0
        self.epochs = {}

    def token(self, t):
        """(epoch, sequence, offset) of token t of the line."""
        epoch, place = divmod(t, self.tokens)
        if epoch not in self.epochs:
            self.epochs[epoch] = list(self._epoch(epoch))
        return epoch, *self.epochs[epoch][place]

    def _epoch(self, epoch):
        n = len(self.lengths)
        size = 1 if self.shuffle == "global" else min(256, max(1, n // 1024))
        blocks = -(-n // size)
        for place in range(blocks):
            block = naive_permute(naive_key(*self.names, epoch), blocks, place)
            members = range(block * size, min(n, (block + 1) * size))
            for i in range(len(members)):
                sequence = members[naive_permute(naive_key(*self.names, epoch, block), len(members), i)]
                yield from ((sequence, offset) for offset in range(self.lengths[sequence]))

    def _window(self):
        """(key parts, first chunk, chunks) of the window that the next sample is in."""
        epoch = (self.origin + self.taken * self.S) // self.tokens
        first = max(0, -((self.origin - epoch * self.tokens) // self.S))
        behind = -((self.origin - (epoch + 1) * self.tokens) // self.S)
        number = (self.taken - first) // self.window
        begin = first + number * self.window
        return (self.grid, epoch, number), begin, min(self.window, behind - begin)

    def _chunk(self, key, begin, chunks, place):
        return self.origin + (begin + naive_permute(naive_key(*self.names, *key), chunks, place)) * self.S

    def take(self):
        if not self.left_over:
            key, begin, chunks = self._window()
            self.taken += 1
            return [(self._chunk(key, begin, chunks, self.taken - 1 - begin), self.S)]
        stretches, missing = [], self.S
        while missing and self.left_over:
            begin, length = self.left_over.pop(0)
            if length > missing:
                self.left_over.insert(0, (begin + missing, length - missing))
                length = missing
            stretches.append((begin, length))
            missing -= length
        if missing:
            stretches.append((self.behind, missing))
        if not self.left_over:
            self.origin, self.taken = self.behind + missing, 0
        return stretches

    def resize(self, sequence_length):
        """Another sequence length: what is left of the window in hand comes first, as one string."""
        if not self.left_over:
            key, begin, chunks = self._window()
            place = self.taken - begin
            if place:
                self.left_over = [(self._chunk(key, begin, chunks, i), self.S) for i in range(place, chunks)]
                self.behind = self.origin + (begin + chunks) * self.S
            else:
                self.origin += self.taken * self.S
        self.S, self.grid, self.taken = sequence_length, self.grid + 1, 0


class Stated:
    """What every position of a run gives; changes are told before the position they are at."""

    def __init__(self, sequences, weights, sequence_length, seed, window, shuffle):
        """``sequences``: {name: lists of ids}, of all datasets that may ever come; ``weights``: {name: weight}."""
        self.sequences, self.S, self.begun = sequences, sequence_length, False
        self.numbers = []  # names in the order of dataset_id
        self.lines = {
            name: StatedLine([len(ids) for ids in lists], sequence_length, (seed, name, "train"), window, shuffle)
            for name, lists in sequences.items()
        }
        self.reweigh(weights)

    def reweigh(self, weights):
        """A new tree; a weight of None is the number of tokens."""
        self.numbers += [name for name in weights if name not in self.numbers]
        self.weights = {name: self.lines[name].tokens if w is None else w for name, w in weights.items()}
        self.datasets = walk(naive_quotas([self.weights.get(name, 0) for name in self.numbers]))

    def change(self, weights, sequence_length):
        self.reweigh(self.weights if weights is None else weights)
        if sequence_length not in (None, self.S):
            self.S = sequence_length
            for line in self.lines.values():
                if self.begun:
                    line.resize(sequence_length)
                else:
                    line.S = sequence_length  # a change at position 0 changes nothing that was given

    def take(self):
        """(dataset number, tokens, labels, places (epoch, sequence, offset) of the tokens) of the next position."""
        number, self.begun = next(self.datasets), True
        line, ids = self.lines[self.numbers[number]], self.sequences[self.numbers[number]]
        tokens, labels, places = [], [], []
        for begin, length in line.take():
            found = [line.token(t) for t in range(begin, begin + length + 1)]
            text = [ids[sequence][offset] for _, sequence, offset in found]
            tokens, labels, places = tokens + text[:-1], labels + text[1:], places + found[:-1]
        return number, tokens, labels, places
