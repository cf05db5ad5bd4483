"""
Plans moves that give all shards the same load.

Half of the weight of all places is their load, and half is their number, because
a place that is empty today can be busy tomorrow.
"""


def weights(loads):
    mean = max(1, sum(loads.values()) / max(1, len(loads)))
    return {place: load + mean for place, load in loads.items()}


def totals(homes, loads, numbers):
    """The load of each shard."""
    found = dict.fromkeys(numbers, 0)
    for place, number in homes.items():
        if number in found:
            found[number] += loads[place]
    return found


def drained(homes, loads, shard, numbers):
    """Moves of all places of a shard to the others, the largest one first."""
    others, loads = [n for n in numbers if n != shard], weights(loads)
    load, moves = totals(homes, loads, others), []
    places = sorted((place for place, number in homes.items() if number == shard),
                    key=lambda place: (-loads[place], place))
    for place in places:
        to = min(others, key=lambda number: (load[number], number))
        load[to] += loads[place]
        moves.append((place, to))
    return moves


def balanced(homes, loads, numbers, tolerance=0.1):
    """As few moves as possible, each from the shard with the highest load to the one
    with the lowest, until these differ by less than a share of the mean, or no
    place is small enough."""
    homes, loads, moves = dict(homes), weights(loads), []
    load = totals(homes, loads, numbers)
    mean = sum(load.values()) / len(numbers)
    moved = set()
    while True:
        first = max(numbers, key=lambda number: (load[number], -number))
        last = min(numbers, key=lambda number: (load[number], number))
        gap = load[first] - load[last]
        if gap <= tolerance * mean:
            return moves
        # Choose the place that brings both loads closest to each other.
        fits = [place for place, number in homes.items() if number == first
                and place not in moved and 0 < loads[place] < gap]
        if not fits:
            return moves
        place = min(fits, key=lambda place: (abs(gap / 2 - loads[place]), place))
        moves.append((place, last))
        moved.add(place)
        homes[place] = last
        load[first] -= loads[place]
        load[last] += loads[place]
