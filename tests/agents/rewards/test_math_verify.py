"""What counts as the same mathematics, where a response's answer is looked for, and answers that cannot be read."""

from __future__ import annotations

import signal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.agents.rewards.mathematics import equals, final_answer, ground_truth
from headway.errors import ScoringFailed
from tests.agents.rewards.test_reward_workers import prompt, reward_of

GSM8K_ANSWER = "He has 3*4 = <<3*4=12>>12 boxes of 90.\n#### 1,080"


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("42", "The answer is 42."),
        ("42", "42.0"),
        ("42.0", r"\boxed{42}"),
        (42, "$42$"),
        (0.5, r"\boxed{\frac12}"),
        (1e-05, r"\boxed{0.00001}"),
        ("3.5e4", "35000"),
        ("1,234", "1234"),
        ("1234", "so it is 1,234"),
        (GSM8K_ANSWER, "#### 1080"),
        (GSM8K_ANSWER, "#### 1,080"),
        (GSM8K_ANSWER, r"\boxed{1080}"),
        ("#### -5", "-5"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}"),
        (r"$\frac{1}{2}$", "1/2"),
        (r"So $x = 7$, and $2x$ is \boxed{14}.", "14"),
        ("x^2+2x+1", r"\boxed{(x+1)^2}"),
        (r"\{1,2\}", r"\boxed{\{2,1\}}"),
        ("[0,1)", r"\boxed{[0,1)}"),
        (r"3\frac{1}{2}", r"\boxed{3.5}"),
        (r"\$18", "$18"),
        ("18", r"\boxed{\$18}"),
        ("18", r"\boxed{18\text{ dollars}}"),
        (r"50\%", r"\boxed{0.5}"),
        ("x=3", r"\boxed{3}"),
        ("A", r"\boxed{A}"),
        ("1,2,3", r"\boxed{3, 1, 2}"),
        ("1,2,3", "The roots are 1, 2, and 3."),
        ("12,34", r"\boxed{12,34}"),
        ("1/2,3", "so 3, 1/2"),
        ("1,234, 5,678", r"\boxed{5678, 1234}"),
        ("1234, 5678", "They are 1,234, 5,678"),
    ],
)
def test_other_spellings_of_the_answer_are_right(answer: object, response: str) -> None:
    assert equals(answer, response)


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("42", "43"),
        ("5", "-5"),
        ("5", ""),
        ("5", "five"),
        ("5", r"\boxed{"),
        (r"\pi", "3.14"),
        ("x^2+2x+1", r"\boxed{(x+2)^2}"),
        ("(1,2)", r"\boxed{(2,1)}"),
        ("[0,1)", r"\boxed{[0,1]}"),
        ("A", r"\boxed{B}"),
        ("10", r"\boxed{10} \boxed{11}"),
        (GSM8K_ANSWER, "12"),
        ("0,1", r"\boxed{1}"),
        ("1,000,2", r"\boxed{10002}"),
        ("1.2", "1,2,3"),
        ("(1,2)", "(2,1)"),
    ],
)
def test_something_else_is_wrong(answer: object, response: str) -> None:
    assert not equals(answer, response)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (r"\boxed{12}, since 3 + 4 = 7", True),
        (r"first \boxed{13}, then 5 is prime", False),
        ("<answer>12</answer>", True),
        ("<answer>13</answer> <answer> 12 </answer>", True),
        ("<answer>12</answer> <answer>13</answer>", False),
        (r"<answer>\boxed{12}</answer> or 13", True),
        ("<answer>twelve</answer> 12", False),
    ],
)
def test_the_answer_is_looked_for_where_it_is_final(response: str, right: bool) -> None:
    assert equals("12", response) is right


@pytest.mark.parametrize("answer", ["", " ", "???", "#### ", None, True, ["1"], {"value": 1}])
def test_an_answer_that_is_no_mathematics_is_named(answer: object) -> None:
    with pytest.raises(ScoringFailed) as error:
        equals(answer, "1")
    assert str(error.value) == f"math_verify cannot read the answer {answer!r}; give LaTeX or a number"


def test_digits_that_count_may_be_set() -> None:
    assert not equals(r"\frac13", "0.33")
    assert equals(r"\frac13", "0.33", float_rounding=2)


def test_variables_of_other_names_count_unless_they_need_not_be_the_same() -> None:
    assert not equals("x+1", r"\boxed{y+1}")
    assert equals("x+1", r"\boxed{y+1}", strict=False)


@settings(max_examples=40, deadline=None)
@given(st.fractions(min_value=-50, max_value=50, max_denominator=40), st.integers(1, 6), st.booleans())
def test_a_fraction_equals_all_its_spellings_and_no_neighbour(q: Fraction, k: int, near: bool) -> None:
    """The arithmetic is `fractions`', of the standard library."""
    given_value = q + Fraction(1, 7) if near else q
    spelled = rf"\boxed{{\frac{{{given_value.numerator * k}}}{{{given_value.denominator * k}}}}}"
    assert equals(f"{q.numerator}/{q.denominator}", spelled) is not near


NUMBERS = st.integers(-2000, 2000)
AS_LISTS = (r"\boxed{%s}", "The answers are %s.", "so $%s$", "<answer>%s</answer>")


@settings(max_examples=10, deadline=None)
@given(st.lists(NUMBERS, min_size=2, max_size=5, unique=True), st.sampled_from(AS_LISTS), st.data())
def test_a_list_equals_its_numbers_in_any_order_and_nothing_else(
    numbers: list[int], form: str, data: st.DataObject
) -> None:
    gold = data.draw(st.sampled_from([",", ", "])).join(map(str, numbers))
    if len(ground_truth(gold)) < len(gold):
        return  # one number, such as 1,234
    other = data.draw(NUMBERS.filter(lambda number: number not in numbers))
    shuffled = data.draw(st.permutations(numbers))
    assert equals(gold, form % ", ".join(map(str, shuffled)))
    wrongs = [shuffled[1:], [*shuffled, other], [*shuffled[1:], other]]
    for wrong in [", ".join(map(str, one)) for one in wrongs] + ["".join(map(str, numbers)), str(sum(numbers))]:
        assert not equals(gold, form % wrong), wrong


@settings(max_examples=15, deadline=None)
@given(st.integers(1000, 10**9), st.sampled_from([*AS_LISTS, "#### %s", "it costs $%s"]), st.data())
def test_only_groups_of_three_digits_are_thousands(number: int, form: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(1, len(str(number)) - 1).filter(lambda place: (len(str(number)) - place) % 3))
    elsewhere = f"{str(number)[:place]},{str(number)[place:]}"
    for gold in (f"{number:,}", str(number), number):
        assert equals(gold, form % f"{number:,}") and equals(gold, form % number)
        assert not equals(gold, form % (number + 1))
        assert not equals(gold, form % f"{number + 1:,}")
    assert not equals(elsewhere, rf"\boxed{{{number}}}")


def test_the_alarm_is_left_to_whoever_set_it() -> None:
    """math-verify's own time limits would take it: `signal.alarm(0)` at the end of each of its calls."""
    handler, limit_of_this_test = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert equals("1/2", r"\boxed{0.5}")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, *limit_of_this_test)


def test_numbers_are_written_out_as_math_verify_reads_them() -> None:
    assert ground_truth("1,234,567.50") == "1234567.50"
    assert ground_truth("-2.5E+3") == "-2500"
    assert ground_truth("1e400000") == "1e400000"
    assert ground_truth(r"a #### \frac12") == r"\frac12"


def test_a_tagged_answer_is_put_into_a_math_environment_unless_it_has_one() -> None:
    assert final_answer(r"<answer>\frac12</answer>") == r"\boxed{\frac12}"
    assert final_answer("<answer>$3$</answer>") == "$3$"


@pytest.mark.slow
async def test_math_verify_scores_in_a_process_and_is_killed_over_what_never_ends(tmp_path: Path) -> None:
    """A tower of powers is one multiplication that never gives the interpreter back. Waits for a limit that is long
    enough for math-verify's first answer in a new process while other tests run.
    """
    log = tmp_path / "reward.log"
    async with reward_of("math_verify", timeout_s=6, log_path=log) as reward:
        assert (await reward.score(prompt("1/2"), [r"\boxed{0.5}", "0.4"])).rewards.tolist() == [1.0, 0.0]
        with pytest.raises(ScoringFailed, match="timeout after 6 s"):
            await reward.score(prompt("1/2"), [r"\boxed{9^{9^{9^9}}}"])
        assert (await reward.score(prompt("1/2"), ["2/4"])).rewards.tolist() == [1.0]
    (started,) = log.read_text().splitlines()
    assert "worker=reward" in started
