"""Prompt sources: rendering, order, cursor, limits, and what the run gets as training and held-out data."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from tokenizers import processors

from headway.config.schema import Config
from headway.data.files import Record
from headway.data.sources import RowSource, build_sources, check_rows, read_rows
from headway.data.tokenize import LeftOut, PromptTokenizer, Reason, total
from headway.data.types import Prompt
from headway.errors import ConfigError, DataError
from tests.data.conftest import CHAT_TEMPLATE, row_source
from tests.tiers import searched

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


class CountingTokenizer:
    """Stands in for `PromptTokenizer`: one token per character; counts calls."""

    def __init__(self, max_length: int = 5) -> None:
        self.max_length = max_length
        self.batches: list[int] = []

    def __call__(self, records: Sequence[Record]) -> list:
        self.batches.append(len(records))
        return [
            LeftOut(Reason.EMPTY, r.source, "it is empty")
            if not r.prompt
            else LeftOut(Reason.TOO_LONG, r.source)
            if len(r.prompt) > self.max_length
            else (r.prompt, np.arange(len(r.prompt), dtype=np.int32))
            for r in records
        ]


def source_of(
    prompts: Sequence[str], tokenizer: CountingTokenizer | None = None, seed: int = 0, **options
) -> RowSource:
    return row_source(
        [Record(prompt, i, "test") for i, prompt in enumerate(prompts)],
        tokenizer or CountingTokenizer(),
        seed=seed,
        **options,
    )


def drain(source: RowSource) -> list[tuple[int, int]]:
    prompts = iter(source.next, None)
    return [(prompt.epoch, prompt.row) for prompt in prompts]


# ---------------------------------------------------------------------------------------------- tokenising


def test_plain_text_is_tokenised_as_it_is(tokenizer) -> None:
    ((text, ids),) = PromptTokenizer(tokenizer, "auto", 10)([Record("ab", 1, "s")])
    assert text == "ab"
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids).replace(" ", "") == "ab"


def test_plain_text_gets_the_models_own_start_and_a_template_does_not_get_it_twice(make_tokenizer) -> None:
    tokenizer = make_tokenizer(CHAT_TEMPLATE, bos=True)
    plain, chat = PromptTokenizer(tokenizer, "auto", 99)([Record("ab", 1, "s"), Record(CHAT, 1, "s")])
    for _, ids in (plain, chat):
        assert ids.tolist().count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("text", ["ab", "<s>ab"])
@pytest.mark.parametrize("form", ["<s> $A", "<s> $A </s>", "$A </s>", "$A"])
def test_a_text_has_the_models_start_once_and_no_end_whatever_its_tokenizer_adds(make_tokenizer, form, text) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    prompts = PromptTokenizer(tokenizer, "auto", 99)
    starts = form.startswith("<s>") or text.startswith("<s>")
    for (_, ids), expected in zip(prompts([Record(text, 1, "s"), Record("c", 1, "s")]), (text, "c"), strict=True):
        assert tokenizer.decode(ids).replace(" ", "").removeprefix("<s>") == expected.removeprefix("<s>")
        assert ids.tolist().count(1) == (starts if expected == text else form.startswith("<s>"))
        assert 2 not in ids.tolist()
    kinds = ["which the tokenizer would add again" in note for note in prompts.notes]
    assert (True in kinds) == (form.startswith("<s>") and text.startswith("<s>"))
    assert (False in kinds) == ("</s>" in form)


THINKS = CHAT_TEMPLATE.replace(
    "{% if add", "{% for t in tools or [] %}{tool:{{ t.function.name }}}{% endfor %}{{ think }}{% if add"
)
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


@pytest.mark.parametrize("spelled", [lambda value: value, json.dumps])
def test_a_chat_template_gets_the_runs_variables_and_tools_and_variables_of_the_row(make_tokenizer, spelled) -> None:
    prompts = PromptTokenizer(make_tokenizer(THINKS), "auto", 99, kwargs={"think": "hmm"})
    rows = [
        Record(CHAT[1:], 1, "s"),
        Record(CHAT[1:], 1, "s", {"chat_template_kwargs": spelled({"think": "no"}), "tools": spelled([TOOL])}),
        Record(CHAT[1:], 1, "s", {"chat_template_kwargs": None, "tools": [spelled(TOOL)]}),
    ]
    assert [text for text, _ in prompts(rows)] == [
        "<s>[user]hihmm[assistant]",
        "<s>[user]hi{tool:look_up}no[assistant]",
        "<s>[user]hi{tool:look_up}hmm[assistant]",
    ]
    assert prompts.notes == []


WRONG_COLUMNS = [
    ({"tools": [TOOL]}, "template", r"\(a.jsonl, line 3\) has tools, and the model's chat template does not show"),
    (
        {"tools": "calculator"},
        "columns",
        r"column 'tools' of s .*line 3\) has 'calculator'; expected a list of schemas",
    ),
    *(
        (
            {"chat_template_kwargs": wrong},
            "columns",
            r"line 3\): the column 'chat_template_kwargs' has .*expected variab",
        )
        for wrong in ("brief", ["think"], {"tokenize": True})
    ),
]


@pytest.mark.parametrize(("columns", "reason", "why"), WRONG_COLUMNS)
def test_a_row_with_wrong_columns_for_the_template_is_left_out_wherever_it_is_met(
    make_tokenizer, columns, reason, why
) -> None:
    prompts = PromptTokenizer(make_tokenizer(CHAT_TEMPLATE), "auto", 99)
    good, bad = Record(CHAT, 1, "s"), Record(CHAT, 1, "s", columns, "a.jsonl, line 3")
    rows = row_source([good] * 199 + [bad], prompts, shuffle=False, epochs=1)  # met after others are trained
    assert len(drain(rows)) == 199
    assert rows.left_out.counts == {"s": {reason: 1}}
    assert re.search(why, rows.left_out.examples[reason])
    with pytest.raises(DataError, match=r"64 of 99 rows, more than data\.max_bad_rows=0\.01 .*\("):
        row_source([bad] * 99, prompts)


def test_columns_that_no_template_uses_are_told(make_tokenizer) -> None:
    def prompts(prompt, template=CHAT_TEMPLATE, kwargs=None, **extra):
        made = PromptTokenizer(make_tokenizer(template), "auto", 99, kwargs=kwargs or {})
        made([Record(prompt, 1, "s", extra, "a.jsonl, line 3")])
        return made.notes

    assert prompts(CHAT, THINKS, {"enable_thinking": False}) == [
        "the model's chat template has no variable enable_thinking (chat_template_kwargs)"
    ]
    notes = prompts("text", THINKS, {"think": "no"}, tools=[TOOL])
    assert [note.split()[0] for note in notes] == ["tools", "data.chat_template_kwargs"]


@pytest.mark.parametrize(
    ("mode", "prompt", "text"),
    [
        ("auto", "2+2", "2+2"),
        ("never", "2+2", "2+2"),
        ("always", "2+2", "<s>[user]2+2[assistant]"),
        ("auto", CHAT, "<s>[system]be brief[user]hi[assistant]"),
        ("always", CHAT, "<s>[system]be brief[user]hi[assistant]"),
    ],
)
def test_the_chat_template_applies_as_configured(make_tokenizer, mode, prompt, text) -> None:
    ((got, ids),) = PromptTokenizer(make_tokenizer(CHAT_TEMPLATE), mode, 99)([Record(prompt, 1, "s")])
    assert got == text
    assert len(ids) == len(text) - len("<s>") * ("<s>" in text) + ("<s>" in text)


@pytest.mark.parametrize(("mode", "prompt"), [("auto", CHAT), ("always", "text")])
def test_a_missing_template_is_explained(tokenizer, mode, prompt) -> None:
    with pytest.raises(DataError, match=r"need a chat template .*tokenizer has none"):
        PromptTokenizer(tokenizer, mode, 99)([Record(prompt, 1, "s")])


def test_messages_that_no_template_may_render_are_explained(make_tokenizer) -> None:
    with pytest.raises(DataError, match="chat_template=never renders none"):
        PromptTokenizer(make_tokenizer(CHAT_TEMPLATE), "never", 99)([Record(CHAT, 1, "s")])


@pytest.mark.parametrize(
    ("template", "prompt", "reason", "why"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            CHAT,
            "template",
            r"template fails on a prompt of s: .*roles",
        ),
        (CHAT_TEMPLATE, [{"role": "user", "content": "a\ud800"}], "tokenizer", r"cannot read a prompt of s: .*ud800"),
        (None, "a\ud800", "tokenizer", r"cannot read a prompt of s: .*ud800': half of a surrogate pair"),
        (None, "", "empty", "a prompt of s has no tokens"),
    ],
)
def test_a_row_that_cannot_be_tokenised_is_left_out_with_its_reason(
    make_tokenizer, template, prompt, reason, why
) -> None:
    good = CHAT if isinstance(prompt, list) and reason != "template" else "ab"
    rows = [Record(good, 1, "s"), Record(prompt, 1, "s"), Record(good, 1, "s")]
    before, left_out, after = PromptTokenizer(make_tokenizer(template), "auto", 99)(rows)
    assert isinstance(left_out, LeftOut)
    assert (left_out.reason, left_out.source) == (reason, "s")
    assert re.search(why, left_out.why)
    assert before[1].tolist() == after[1].tolist() != []


# ---------------------------------------------------------------------------------------------- order and cursor


def test_without_shuffling_rows_come_in_order_epoch_after_epoch() -> None:
    assert drain(source_of("abc", shuffle=False, epochs=2)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    drawn = drain(source_of("abcdefghij" * 3, epochs=3))
    epochs = [[row for epoch, row in drawn if epoch == e] for e in range(3)]
    assert all(sorted(rows) == list(range(30)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3


def test_the_order_depends_on_the_seed_alone() -> None:
    drawn = drain(source_of("abcdefghij", epochs=2, prefetch=1))
    np.random.seed(123)
    assert drain(source_of("abcdefghij", epochs=2, prefetch=7)) == drawn
    assert drain(source_of("abcdefghij", epochs=2, seed=1)) != drawn


def test_without_a_limit_epochs_never_end() -> None:
    source = source_of("ab")
    assert [source.next().epoch for _ in range(7)] == [0, 0, 1, 1, 2, 2, 3]


def test_after_the_last_epoch_there_is_nothing_however_often_asked() -> None:
    source = source_of("a", epochs=1)
    assert source.next() is not None
    assert source.next() is None
    assert source.next() is None


@searched(
    100,
    prompts=st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=12).filter(
        lambda prompts: any(len(p) <= 5 for p in prompts)
    ),
    taken=st.integers(0, 40),
    prefetch=st.integers(0, 9),
    other_prefetch=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_a_restored_source_goes_on_where_the_saved_one_stood(prompts, taken, prefetch, other_prefetch, seed) -> None:
    """Whatever was tokenised ahead, in this run or the next."""
    source = source_of(prompts, seed=seed, epochs=4, prefetch=prefetch)
    for _ in range(taken):
        source.next()
    state = json.loads(json.dumps(source.state()))
    left_out = source.left_out.counts
    resumed = source_of(prompts, seed=seed, epochs=4, prefetch=other_prefetch)
    resumed.restore(state)
    assert resumed.left_out.counts == left_out
    assert drain(resumed) == drain(source)
    assert total(resumed.left_out.counts) == total(source.left_out.counts) == sum(len(p) > 5 for p in prompts)


def test_a_cursor_over_other_data_is_refused() -> None:
    state = source_of("abc").state()
    with pytest.raises(DataError, match=r"rows 3 then, 4 now"):
        source_of("abcd").restore(state)
    with pytest.raises(DataError, match="seed 0 then, 1 now"):
        source_of("abc", seed=1).restore(state)


def test_prompts_are_tokenised_in_chunks_ahead_of_their_use() -> None:
    tokenizer = CountingTokenizer()
    source = source_of("abcdefghij", tokenizer, prefetch=4)
    for _ in range(4):
        source.next()
    assert tokenizer.batches == [4]
    source.next()
    assert tokenizer.batches == [4, 4]


def test_running_a_prompt_again_is_a_further_attempt() -> None:
    source = source_of("ab")
    prompt = source.next()
    again = source.again(source.again(prompt))
    assert (again.epoch, again.row, again.attempt) == (prompt.epoch, prompt.row, 2)
    assert again.trajectory_id(1) != prompt.trajectory_id(1)


def test_a_prompt_longer_than_the_limit_is_left_out_and_counted_once() -> None:
    source = source_of(["ok", "far too long", "ok"], epochs=3, shuffle=False)
    assert drain(source) == [(e, row) for e in range(3) for row in (0, 2)]
    assert total(source.left_out.counts) == 1


def test_one_good_row_among_many_is_found_in_every_epoch() -> None:
    source = source_of(["far too long"] * 30 + ["ok"], prefetch=1)
    assert [source.next().row for _ in range(10)] == [30] * 10


@pytest.mark.parametrize("epochs", [None, 1])
def test_nothing_but_too_long_prompts_is_an_error_at_once(epochs: int | None) -> None:
    with pytest.raises(DataError, match=r"all 2 prompts .*data\.max_prompt_length=5 tokens"):
        source_of(["far too long", "and another"], epochs=epochs)


ONE_IN_100 = [*"abcde" * 50, "", *"abcde" * 50]


def test_a_bad_row_is_left_out_once_and_all_others_keep_their_index() -> None:
    source = source_of(ONE_IN_100, epochs=2, shuffle=False)
    drawn = drain(source)
    assert drawn == [(epoch, row) for epoch in (0, 1) for row in range(501) if row != 250]
    assert source.left_out.counts == {"test": {"empty": 1}}
    assert source.left_out.examples == {"empty": "it is empty"}


def test_more_bad_rows_than_allowed_end_the_run_with_the_commonest_reason() -> None:
    source = source_of([*"abcde" * 50, *[""] * 3], prefetch=10, shuffle=False)
    with pytest.raises(DataError, match=r"3 of 253 rows, more than data\.max_bad_rows=0\.01 .*\(empty 3\)"):
        drain(source)
    assert (
        len(list(itertools.islice(iter(source_of([*"abcde" * 50, *[""] * 3], max_bad_rows=1).next, None), 600))) == 600
    )


def test_a_first_batch_without_a_good_row_ends_the_run_before_it_starts() -> None:
    with pytest.raises(DataError, match=r"first 64 rows .*\(empty 64\)"):
        source_of([*[""] * 64, *"abcde" * 2000], shuffle=False)
    assert source_of([*[""] * 63, *"abcde" * 2000], shuffle=False).next() is not None


def test_a_task_that_raises_for_a_problem_leaves_it_out(tokenizer, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(
        "from headway.data.tasks import Problem\n"
        "class T:\n"
        "    def problem(self, index):\n"
        "        return Problem(f'{index}+1=', str(1 // (index % 150 - 149)))\n"
        "    def score(self, response, answer, extra):\n"
        "        return 0.0\n"
        "def make(params, seed, problems):\n"
        "    return T()\n"
    )
    settings = {"name": f"{task}:make", "size": 140, "val_size": 100}
    bundle = build_sources(config_of(task=settings, epochs=1, max_bad_rows=0.02), tokenizer)
    assert rows_of(list(iter(bundle.train.next, None))) == set(range(140))
    settings["size"] = 200
    bundle = build_sources(config_of(task=settings, epochs=1, max_bad_rows=0.02), tokenizer)
    assert rows_of(list(iter(bundle.train.next, None))) == set(range(200)) - {149}
    assert (total(bundle.train.left_out.counts), total(bundle.val_left_out.counts)) == (1, 0)
    with pytest.raises(DataError, match=r"1 of 101 held-out rows, .*\(task 1\): .*problem\(299\): ZeroDivision"):
        build_sources(config_of(task=settings | {"size": 149}, max_bad_rows=0), tokenizer)


def test_rows_that_a_template_refuses_for_their_roles_are_found_before_the_start(make_tokenizer, tmp_path) -> None:
    template = CHAT_TEMPLATE.replace("[{{ m.role }}]", "{{ raise_exception('no') if m.role == 'tool' else m.role }}")
    rows = [{"prompt": [{"role": "tool" if i == 300 else "user", "content": f"{i}"}], "answer": i} for i in range(400)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, tokenizer = config_of(train=str(file), val_size=0), make_tokenizer(template)
    (note,) = check_rows(config, tokenizer, read_rows(config))
    assert note.startswith("1 training row cannot be used and is left out (template 1): ")
    assert "line 301" in note
    with pytest.raises(DataError, match=r"1 of 400 rows, more than data.max_bad_rows=0 of them.*line 301"):
        check_rows(config_of(train=str(file), val_size=0, max_bad_rows=0), tokenizer, read_rows(config))


def test_a_column_of_json_text_that_is_wrong_in_one_row_is_found_before_the_start(make_tokenizer, tmp_path) -> None:
    file = tmp_path / "chats.jsonl"
    columns = [json.dumps(["think"] if i == 300 else {"think": f"{i}"}) for i in range(400)]
    rows = [{"prompt": CHAT, "answer": 1, "chat_template_kwargs": column} for column in columns]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(train=str(file), val_size=0)
    (note,) = check_rows(config, make_tokenizer(THINKS), read_rows(config))
    assert note.startswith("1 training row cannot be used and is left out (columns 1): ")
    assert "line 301): the column 'chat_template_kwargs' has ['think']" in note


def test_a_programs_rows_have_variables_for_the_template_also_where_they_are_text(make_tokenizer, tmp_path) -> None:
    file = tmp_path / "rows.jsonl"

    def notes(**columns) -> list[str]:
        file.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "1", **columns}) + "\n" for i in range(9)))
        data, agent = {"train": str(file), "val_size": 0}, {"tools": ["tools.py:f"]}
        config = Config.model_validate({"data": data, "agent": agent})
        return check_rows(config, make_tokenizer(THINKS), read_rows(config))

    assert notes(chat_template_kwargs={"think": "no"}) == []
    assert notes(tools=[TOOL])[0].startswith("the column 'tools' is not shown to the model")
    with pytest.raises(DataError, match=r"line 1\): .*'chat_template_kwargs' has 'brief'"):
        notes(chat_template_kwargs="brief")
    parameters = {"type": "object", "properties": {"role": {"type": "string"}}}
    assert notes(tools=[{"type": "function", "function": {"name": "invite", "parameters": parameters}}])


def test_no_rows_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="no training prompts"):
        source_of([])


# ---------------------------------------------------------------------------------------------- a run's data


def config_of(**data) -> Config:
    return Config.model_validate({"data": data, "run": {"seed": 3}})


@pytest.fixture
def train_file(tmp_path: Path) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": i, "tag": "t"}) + "\n" for i in range(40)))
    return str(path)


def rows_of(prompts: Sequence[Prompt]) -> set[int]:
    return {prompt.row for prompt in prompts}


def test_a_file_is_split_by_seed_into_disjoint_parts(train_file: str, tokenizer) -> None:
    bundle = build_sources(config_of(train=train_file, val_size=10, epochs=1), tokenizer)
    again = build_sources(config_of(train=train_file, val_size=10, epochs=1), tokenizer)
    train = list(iter(bundle.train.next, None))
    assert bundle.train.rows == len(train) == 30
    assert rows_of(train) | rows_of(bundle.val) == set(range(40))
    assert [p.text for p in again.val] == [p.text for p in bundle.val]
    assert all(p.text == f"{p.row}?" and p.answer == p.row and p.extra == {"tag": "t"} for p in train + bundle.val)


def test_a_validation_file_replaces_the_split(train_file: str, tmp_path: Path, tokenizer) -> None:
    val = tmp_path / "val.jsonl"
    val.write_text(json.dumps({"prompt": "held out", "answer": 1}) + "\n")
    bundle = build_sources(config_of(train=train_file, val=str(val)), tokenizer)
    assert bundle.train.rows == 40
    assert [(p.text, p.row, p.source) for p in bundle.val] == [("held out", 40, "val")]


def test_holding_out_every_row_is_an_error(train_file: str, tokenizer) -> None:
    with pytest.raises(DataError, match=r"data\.val_size=40 .*of 40 rows"):
        build_sources(config_of(train=train_file, val_size=40), tokenizer)


def test_no_held_out_rows_is_allowed(train_file: str, tokenizer) -> None:
    assert build_sources(config_of(train=train_file, val_size=0), tokenizer).val == []


def test_a_task_brings_its_own_held_out_problems(tokenizer) -> None:
    bundle = build_sources(config_of(task={"name": "sort", "size": 50, "val_size": 20}, epochs=1), tokenizer)
    train = list(iter(bundle.train.next, None))
    assert len(bundle.val) == 20
    assert rows_of(train) == set(range(50))
    assert rows_of(bundle.val) == set(range(50, 70))
    assert {p.text for p in train}.isdisjoint(p.text for p in bundle.val)
    assert train[0].source == "sort"
    assert train[0].answer == "".join(sorted(train[0].text.removeprefix("sort:").removesuffix("=")))


def test_a_validation_file_replaces_a_tasks_held_out_problems(tmp_path: Path, tokenizer) -> None:
    val = tmp_path / "val.jsonl"
    val.write_text(json.dumps({"prompt": "sort:21=", "answer": "12"}) + "\n")
    bundle = build_sources(config_of(task={"name": "sort", "size": 50}, val=str(val)), tokenizer)
    assert [(p.text, p.row) for p in bundle.val] == [("sort:21=", 50)]


def test_prompts_of_one_million_problems_are_not_made_before_they_are_needed(tokenizer) -> None:
    bundle = build_sources(config_of(task={"name": "reverse", "size": 1_000_000, "val_size": 4}), tokenizer)
    assert len(list(itertools.islice(iter(bundle.train.next, None), 5))) == 5


def test_prompts_left_out_of_both_parts_are_counted(tokenizer) -> None:
    params = {"min_length": 2, "mean_length": 6, "max_length": 20}
    config = config_of(
        task={"name": "sort", "size": 100, "val_size": 100, "params": params}, max_prompt_length=12, epochs=1
    )
    bundle = build_sources(config, tokenizer)
    trained = len(list(iter(bundle.train.next, None)))
    assert total(bundle.train.left_out.counts) == 100 - trained > 0
    assert total(bundle.val_left_out.counts) == 100 - len(bundle.val) > 0
    assert all(len(p.token_ids) <= 12 for p in bundle.val)


def test_held_out_prompts_that_are_all_too_long_are_an_error(train_file: str, tmp_path: Path, tokenizer) -> None:
    val = tmp_path / "val.jsonl"
    val.write_text(json.dumps({"prompt": "x" * 50, "answer": 1}) + "\n")
    with pytest.raises(DataError, match="all 1 held-out prompts"):
        build_sources(config_of(train=train_file, val=str(val), max_prompt_length=10), tokenizer)


def test_nothing_to_train_on_is_an_error(tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"data.train \(a file\) or data.task"):
        build_sources(config_of(), tokenizer)


def test_a_cursor_goes_on_over_changed_data_where_that_is_asked_for() -> None:
    source = source_of("abcdef", shuffle=False, digests=["1", "2", "3"])
    for _ in range(4):
        source.next()
    mended = source_of("abcdEf", shuffle=False, digests=["1", "2", "4"], accept_changes=True)
    mended.restore(source.state())
    assert mended.changes == ("other prompts in the rows 4 to 5, counted from 0",)
    assert mended.next().text == "E"
    shorter = source_of("abc", shuffle=False, digests=["1", "2"], accept_changes=True)
    shorter.restore(source.state())
    assert shorter.changes[0] == "rows 6 then, 3 now"
    assert (shorter.next().epoch, shorter.find(0, 1).text, shorter.find(0, 5)) == (0, "b", None)


def test_a_prompt_is_found_by_its_row_and_epoch() -> None:
    source = source_of(["ab", "far too long", "c"], row_numbers=[3, 5, 9], held_out=7)
    for prompt in [source.next() for _ in range(9)]:
        found = source.find(prompt.epoch, prompt.row)
        assert (found.epoch, found.row, found.text) == (prompt.epoch, prompt.row, prompt.text)
    assert source.find(0, 5) is None


def test_a_cursor_over_the_same_rows_in_another_order_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": letter, "answer": ""} for letter in "abcdef"]
    states = []
    for name, order in (("one", rows), ("two", rows[::-1])):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in order))
        states.append(read_rows(config_of(train=str(file), val_size=0)).digests)
    assert states[0] != states[1]
    source = source_of("abcdef", digests=states[0])
    with pytest.raises(DataError, match=r"rows 0 to 5\b.*data\.accept_changes"):
        source_of("abcdef", digests=states[1]).restore(source.state())
