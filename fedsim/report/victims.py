"""Counts the different images that a line's trials attacked, and groups trials that share one."""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.results.lines import ResultRow


def images(rows: Sequence[ResultRow]) -> int | None:
    """Returns how many different images, or rows of a table, were attacked.

    It is None if no row says. A recording that never arrived has no victims.
    """
    recorded = [row.victims for row in rows if row.victims is not None]
    if not recorded:
        return None
    return len({victim for victims in recorded for victim in victims})


def units(rows: Sequence[ResultRow]) -> list[list[int]]:
    """Groups the indices of `rows` so that no two groups have an image in common.

    Trials of one image are one measurement of it. Releases of a table toss their own coins on which
    rows take part, so each is a group.
    """
    groups: list[tuple[set[str], list[int]]] = []
    for index, row in enumerate(rows):
        victims = set() if row.main.asked_singly else set(row.victims or ())
        sharing = [group for group in groups if group[0] & victims]
        groups = [group for group in groups if group not in sharing]
        members = [member for _, indices in sharing for member in indices]
        groups.append((victims.union(*(shared for shared, _ in sharing)), [*members, index]))
    return sorted(sorted(members) for _, members in groups)
