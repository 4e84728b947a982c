"""The most of anything that can be asked for: what is beyond is a slip of the hand, and no machine could hold it."""

LONGEST = 2**24  # tokens of a sequence
LONGEST_SPREAD = 2**40  # tokens of a sequence over a cluster, on paper
FASTEST = 10**6  # gigabytes, or gigabytes a second, of a card
WIDEST = 2**12  # channels of a head
MOST = 2**20  # of anything that is counted
STEPS = 10**9  # of training, or between two of its measurements
LAST_SEED = 2**32 - 1  # numpy's
