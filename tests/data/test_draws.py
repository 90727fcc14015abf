from __future__ import annotations

import subprocess
import sys

from headway.data.mixing import drawn_problems, place_of_group, share_of


def drawn(seed: int, share: float, groups: int = 20_000) -> set[int]:
    return {number for number in range(groups) if place_of_group(seed, number) < share}


def test_so_many_groups_of_each_version_are_drawn_on_average() -> None:
    found = drawn(0, share_of(2, 16))
    of_version = [sum(number // 16 == version for number in found) for version in range(20_000 // 16)]
    assert abs(sum(of_version) / len(of_version) - 2) < 0.15
    assert max(of_version) > 4  # each group by itself: no version has exactly two
    assert min(of_version) == 0


def test_a_smaller_share_draws_some_of_the_same_groups() -> None:
    assert drawn(3, 0.05) < drawn(3, 0.1) < drawn(3, 0.2)
    assert drawn(3, share_of(0, 16)) == set()
    assert drawn(3, share_of(100, 16), 50) == set(range(50))


def test_the_seed_and_the_number_alone_decide_in_every_process() -> None:
    code = "from headway.data.mixing import *\n"
    code += "print([place_of_group(7, n) for n in range(5)], *drawn_problems(7, range(9), 3))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    problems = " ".join(map(str, drawn_problems(7, range(9), 3)))
    assert done.stdout.strip() == f"{[place_of_group(7, n) for n in range(5)]} {problems}"
    assert drawn(7, 0.1, 500) != drawn(8, 0.1, 500)


def test_problems_are_as_many_as_there_are_to_be_and_follow_their_rows() -> None:
    rows = [5, 9, 11, 200, 7, 3]
    assert len(drawn_problems(0, rows, 2)) == 2
    assert drawn_problems(0, rows, 10) == frozenset(range(6))
    assert drawn_problems(0, rows, 0) == drawn_problems(0, [], 2) == frozenset()
    chosen = {rows[index] for index in drawn_problems(0, rows, 3)}
    assert {rows[::-1][index] for index in drawn_problems(0, rows[::-1], 3)} == chosen
