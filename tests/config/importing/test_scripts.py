"""Shell scripts are read as a shell would expand them; what only running them would tell is named."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from headway.config.migration.shell_scripts import missing, read_script, written
from headway.errors import ConfigError

KNOWN = [
    ("n=4\nrun a.b=$n", ["run", "a.b=4"]),
    ('n="4 5"\nrun "a.b=${n}"', ["run", "a.b=4 5"]),
    ("n='4 5'\nrun $n", ["run", "4", "5"]),
    ("run a.b=${N:-8}", ["run", "a.b=8"]),
    ("N=2\nrun a.b=${N:-8}", ["run", "a.b=2"]),
    ('base=data\nfile=${F:-"$base/x.parquet"}\nrun a.f="$file"', ["run", "a.f=data/x.parquet"]),
    ("a=3\nb=$((a * 2 + 1))\nrun x.y=$((b / 2))", ["run", "x.y=3"]),
    ("a=3\nrun x.y=$(((a + 2) * 2))", ["run", "x.y=10"]),
    ("run a.b=1 \\\n  c.d=2 # not this", ["run", "a.b=1", "c.d=2"]),
    ('run a.b=\'["x","y"]\' "$@"', ["run", 'a.b=["x","y"]']),
    ("run a.b=['x','y'] $@", ["run", "a.b=[x,y]"]),
    ("run 'a.b=$n'", ["run", "a.b=$n"]),
    ('ARGS=(\n  a.b=1 # one\n  c.d=2\n)\nrun "${ARGS[@]}" e.f=3', ["run", "a.b=1", "c.d=2", "e.f=3"]),
    ("A=1\nA+=2\nrun a.b=$A", ["run", "a.b=12"]),
    ("export A=1; B=2 && run a.b=$A$B", ["run", "a.b=12"]),
    ('m=async\nif [ "$m" = "async" ]; then\n  r=True\nelse\n  r=False\nfi\nrun a.b=$r', ["run", "a.b=True"]),
    ('m=sync\nif [ "$m" = "async" ]; then\n  r=True\nelse\n  r=False\nfi\nrun a.b=$r', ["run", "a.b=False"]),
    ("X=1 run a.b=2", ["run", "a.b=2"]),
    ('m=a\nif [ "$m" = "a" ]; then x=1; else x=2; fi\nrun a.b=$x', ["run", "a.b=1"]),
    ('m=b\nif [ "$m" = "a" ]; then x=1; else x=2; y=3; fi\nrun a.b=$x$y', ["run", "a.b=23"]),
    ('m=b\nif [ "$m" = "a" ]; then x=1; elif [ $m = b ]; then x=2; else x=3; fi\nrun a.b=$x', ["run", "a.b=2"]),
    ('m=b\nif [ "$m" = "a" ] || [ "$m" = b ]; then x=1; else x=2; fi\nrun a.b=$x', ["run", "a.b=1"]),
    ('m=b\nif [ "$m" = "a" ] && [ -n "$m" ]; then x=1; else x=2; fi\nrun a.b=$x', ["run", "a.b=2"]),
    ('n=8\n[ "$m" = "x" ] && n=99\nrun a.b=$n'.replace("$m", "${m:-}"), ["run", "a.b=8"]),
    ('n=8\n[ "$n" = "8" ] && n=99 || n=3\nrun a.b=$n', ["run", "a.b=99"]),
    ('n=8\n[ "$n" = "9" ] && { n=99; m=1; }\nrun a.b=$n${m:-}', ["run", "a.b=8"]),
    ('n=8\n[ "$n" = "9" ] || {\n  n=99\n}\nrun a.b=$n', ["run", "a.b=99"]),
    ("n=8\nif [[ $n == 9 || $n == 8 ]]; then n=3; fi\n[[ $n == 3 ]] && m=1\nrun a.b=$n$m", ["run", "a.b=31"]),
    ('n=1\n[ "$n" -gt 1 ] && n=2\n[ "$n" -le 1 ] && m=3\nrun a.b=$n$m', ["run", "a.b=13"]),
    ("export A=4 B=2\nC=1 D=$C\nrun a.b=$A$B$C$D", ["run", "a.b=4211"]),
    ("z=0\ncase $1 in a) case $2 in x) z=1;; esac;; b) z=2;; esac\nrun a.b=$z", ["run", "a.b=0"]),
    ("x=/a/b\nrun a.b=${x##*/}", ["run", "a.b=b"]),
    ("g=(0 1 2)\nrun a.b=${#g[@]}", ["run", "a.b=3"]),
    ("for i in 1; do x=$i; done; x=2; run a.b=$x", ["run", "a.b=2"]),
    ("n=3 # it's not\nrun a.b=$n", ["run", "a.b=3"]),
]


@pytest.mark.parametrize(("text", "words"), KNOWN)
def test_a_script_is_read_as_the_shell_would_run_it(text: str, words: list[str]) -> None:
    assert read_script(text).commands == [words]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
def test_bash_agrees() -> None:
    script = "run() { printf '%s\\037' run \"$@\"; printf '\\036'; }\n" + "\n".join(
        f"( set --\n{text}\n)" for text, _ in KNOWN
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=240)
    assert [command.split("\037")[:-1] for command in done.stdout.split("\036")[:-1]] == [words for _, words in KNOWN]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("run a.b=$DATA/x", ["$DATA"]),
        ("run a.b=$(date +%s)", ["$(date +%s)"]),
        ("run a.b=$((N * 2))", ["$((N * 2))"]),
        ("run a.b=`hostname`", ["`hostname`"]),
        ("x=$UNSET/y\nrun a.b=$x", ["$UNSET"]),
        ("run a.b=$1", ["$1"]),
        ("run a.b=${#GPUS[@]}", ["${#GPUS[@]}"]),
    ],
)
def test_what_a_script_does_not_say_is_named(text: str, names: list[str]) -> None:
    (_, word), *_ = read_script(text).commands
    assert missing(word) == names
    assert all(name in written(word) for name in names)


def test_a_command_in_quotes_is_read() -> None:
    script = read_script("n=3\nsrun -N 2 bash -c \"cd x && run a.b=$n c.d='1 2'\"\nssh host /bin/sh -lc 'run e.f=$n'")
    assert script.commands == [["cd", "x"], ["run", "a.b=3", "c.d=1 2"], ["run", "e.f=3"]]


def test_a_here_document_is_text() -> None:
    script = read_script("cat > hosts <<EOF\nit's a.b=1\nEOF\nrun a.b=2")
    assert script.commands == [["cat", ">", "hosts"], ["run", "a.b=2"]]


def test_a_script_is_not_run(tmp_path: object) -> None:
    script = read_script("touch here && rm -rf $HOME\nx=$(touch there)\nrun a.b=$x")
    assert script.commands == [["touch", "here"], ["rm", "-rf", "$HOME"], script.commands[2]]


def test_a_condition_that_cannot_be_told_is_remarked() -> None:
    script = read_script('if [ -n "$SLURM_JOB_ID" ]; then\n  n=2\nfi\nrun a.b=$n')
    assert script.commands == [["run", "a.b=2"]]
    assert script.remarks == ['`if [ -n "$SLURM_JOB_ID" ]` is taken to hold']


@pytest.mark.parametrize(
    "condition",
    ["$A", "false", "! grep -q x hosts", 'test -n "$A"', "(( N > 2 ))", "[ a = a ] && false", "[ a = b ] || false"],
)
def test_a_condition_that_is_a_command_is_remarked(condition: str) -> None:
    script = read_script(f"n=1\nif {condition}; then\n  n=2\nelse\n  n=3\nfi\nrun a.b=$n")
    assert script.commands[-1] == ["run", "a.b=2"]
    assert script.remarks == [f"`if {condition}` is taken to hold"]


def test_a_command_behind_a_condition_that_fails_decides_nothing() -> None:
    script = read_script("n=1\nif [ a = b ] && grep -q x hosts; then\n  n=2\nfi\nrun a.b=$n")
    assert script.commands == [["run", "a.b=1"]] and not script.remarks


@pytest.mark.parametrize(
    ("text", "command", "remark"),
    [
        ('[ "$M" = x ] && n=9\nrun a.b=$n', ["run", "a.b=9"], '`[ "$M" = x ]` is taken to hold'),
        ('n=1\n[ "$M" = x ] || n=9\nrun a.b=$n', ["run", "a.b=1"], '`[ "$M" = x ]` is taken to hold'),
        (
            'n=1\ncase "$M" in\n  b) n=9 ;;\nesac\nrun a.b=$n',
            ["run", "a.b=1"],
            '`case "$M" in b) n=9 ;; esac`: no branch is taken',
        ),
    ],
)
def test_what_depends_on_something_unknown_is_remarked(text: str, command: list[str], remark: str) -> None:
    script = read_script(text)
    assert script.commands == [command] and script.remarks == [remark]


@pytest.mark.parametrize("text", ["run 'a.b=1", 'x="1\nrun a.b=2'])
def test_quotes_that_do_not_close_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a ['\"] of .*never closed"):
        read_script(text)


def test_a_case_that_is_never_closed_is_passed_over() -> None:
    script = read_script("run a.b=1\ncase $1 in")
    assert script.commands == [["run", "a.b=1"]] and script.remarks == ["`case $1 in`: no branch is taken"]
