"""Whose images a line's trials attacked: how many different ones, and which trials share one."""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.results.reading import ResultRow


def images(rows: Sequence[ResultRow]) -> int | None:
    """Different images, or rows of a table, that were attacked; None if a row does not tell.

    A recording that never arrived has none.
    """
    known = [row.victims for row in rows if row.victims is not None]
    if not known:
        return None
    return len({victim for victims in known for victim in victims})


def units(rows: Sequence[ResultRow]) -> list[list[int]]:
    """Indices of `rows` in groups, of which no two have an image in common.

    Trials of one image are one measurement of it. Releases of a table each toss coins of their own
    on which of a client's rows take part, so that each of them is one.
    """
    groups: list[tuple[set[str], list[int]]] = []
    for index, row in enumerate(rows):
        victims = set(row.victims or ()) if row.subject == "images" else set()
        sharing = [group for group in groups if group[0] & victims]
        groups = [group for group in groups if group not in sharing]
        members = [each for _, own in sharing for each in own]
        groups.append((victims.union(*(own for own, _ in sharing)), [*members, index]))
    return sorted(sorted(members) for _, members in groups)
