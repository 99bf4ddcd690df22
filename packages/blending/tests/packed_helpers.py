"""Rows of packed documents, said a second time: loops and lists, nothing of the package."""

from blending_helpers import naive_key, naive_permute

FORMAT = "best_fit-1"


def naive_best_fit(lengths, capacity):
    """Items of each row: the longest first, each to the row with the least room that holds it, else to a new one."""
    rooms, rows = [], []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= lengths[item]]
        if fitting:
            row = min(fitting)[1]
        else:
            row = len(rooms)
            rooms.append(capacity)
            rows.append([])
        rooms[row] -= lengths[item]
        rows[row].append(item)
    return rows


class NaiveRows:
    """One dataset's rows, each a list of pieces (document, offset, tokens)."""

    def __init__(self, lengths, S, seed=1234, name="a", part="train", window=16, shuffle="global"):
        self.lengths, self.S, self.names = lengths, S, (seed, name, part, FORMAT)
        block = 1 if shuffle == "global" else min(256, max(1, len(lengths) // 1024))
        blocks, key = -(-len(lengths) // block), naive_key(*self.names)
        places = [naive_permute(key, blocks, place) for place in range(blocks)]
        each = max(1, window // block)
        self.windows = []
        for first in range(0, blocks, each):
            some = [b * block + i for b in sorted(places[first : first + each]) for i in range(block)]
            self.windows.append(self._packed([document for document in some if document < len(lengths)]))
        self.per_epoch = sum(map(len, self.windows))

    def _packed(self, documents):
        pieces = [
            (document, offset, min(self.S, self.lengths[document] - offset))
            for document in documents
            for offset in range(0, self.lengths[document], self.S)
        ]
        return [[pieces[i] for i in row] for row in naive_best_fit([tokens for *_, tokens in pieces], self.S)]

    def row(self, sample):
        """The pieces of a row."""
        epoch, place = divmod(sample, self.per_epoch)
        order = naive_key(*self.names, epoch)
        for slot in range(len(self.windows)):
            number = naive_permute(order, len(self.windows), slot)
            rows = self.windows[number]
            if place < len(rows):
                return rows[naive_permute(naive_key(*self.names, epoch, number), len(rows), place)]
            place -= len(rows)
        raise AssertionError(sample)

    def arrays(self, sample, texts):
        """tokens, labels, loss, positions, number of the document in each column; 0 without loss is padding."""
        tokens, labels, loss, positions, numbers = [], [], [], [], []
        for number, (document, offset, length) in enumerate(self.row(sample)):
            text = texts[document]
            follows = text[offset + 1 : offset + 1 + length]
            missing = length - len(follows)
            tokens += text[offset : offset + length]
            labels += follows + [0] * missing
            loss += [1.0] * len(follows) + [0.0] * missing
            positions += range(length)
            numbers += [number] * length
        left = self.S - len(tokens)
        none = [0] * left
        numbers += [numbers[-1] + 1] * left
        return tokens + none, labels + none, loss + [0.0] * left, [*positions, *range(left)], numbers
