"""`fedskew --help` and shell completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from fedskew.cli.app import app


def test_commands_are_in_five_groups(cli):
    text = cli("--help").out
    headings = re.findall(r"^╭─ (.*?) ─", text, re.MULTILINE)
    assert headings == ["Options", "Start here", "Compare", "Inspect", "Lab", "Federation"]
    assert text.index("│ demo") < text.index("Compare") < text.index("│ compare") < text.index("Inspect")


def test_every_command_is_in_a_group(cli):
    listed = set(re.findall(r"^│ ([a-z]+) ", cli("--help").out, re.MULTILINE))
    assert listed == set(get_command(app).commands)


def test_only_the_terminal_breaks_the_lines_of_a_paragraph():
    commands = [get_command(app)]
    for command in commands:
        assert "\n" not in (command.help or "").strip().replace("\n\n", ""), command.name
        commands += getattr(command, "commands", {}).values()


@pytest.mark.parametrize(("words", "expected"), [("fedskew dia", "diagnose"), ("fedskew federate ce", "certs")])
def test_bash_completes_commands(words, expected):
    completion = {"_FEDSKEW_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-c", "from fedskew.cli import main; main()"]
    done = subprocess.run(command, env=os.environ | completion, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [expected], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_a_shell_is_printed(shell):
    command = [sys.executable, "-c", "from fedskew.cli import main; main()", "--show-completion"]
    detected = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([*command, shell], env=os.environ | detected, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "_FEDSKEW_COMPLETE" in done.stdout
