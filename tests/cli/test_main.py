"""The command line as a user meets it: every command in a process of its own where the process matters."""

import json
import os
import subprocess
import sys

import pytest

from fxpar.cli.main import main, unexpected_error
from fxpar.cli.options import hint, memory, names, refuse_unsupported
from fxpar.plans.errors import FxparError
from fxpar.version import VERSION

COMMANDS = (["compile"], ["verify"], ["check"], ["show"], ["explain"], ["rules", "list"], ["rules", "coverage"],
            ["rules", "check"])


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-m", "fxpar", *arguments], capture_output=True, text=True, timeout=120, env=environment
    )


def exit_code(*arguments: str) -> int:
    """Of a command line that argparse ends."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command, capsys):
    assert exit_code(*command, "--help") == 0
    shown = capsys.readouterr().out
    assert "example:\n  fxpar " + " ".join(command) in shown and "--json" in shown


def test_help_and_version(capsys):
    assert exit_code("--help") == 0
    shown = capsys.readouterr().out
    assert all(command[0] in shown for command in COMMANDS)
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.strip() == f"fxpar {VERSION}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["compile", "m.py"], "-o/--output"),
        (["compile", "m.py", "-o", "p"], "give --cluster"),
        (["compile", "m.py", "-o", "p", "--mesh", "2y2"], "--mesh: '2y2' is not a mesh"),
        (["compile", "m.py", "-o", "p", "--mesh", "dp=2,dp=2"], "names an axis twice"),
        (["compile", "m.py", "-o", "p", "--mesh", "2", "--memory", "lots"], "--memory: 'lots'"),
        (["compile", "m.py", "-o", "p", "--mesh", "2", "--gap", "1"], "--gap: '1'"),
        (["compile", "m.py", "-o", "p", "--mesh", "2", "--hint", "a=tp:"], "--hint: 'a=tp:'"),
        (["compile", "m.py", "-o", "p", "--mesh", "2", "--pin", "a"], "--pin: 'a' is not a pin"),
        (["compile", "m.py", "-o", "p", "--mesh", "2", "--zero", "4"], "--zero"),
        (["compile", "m.py", "-o", "p", "--mesh", "2", "--microbatches", "0"], "--microbatches: '0'"),
        (["compile", "m.py", "-o", "p", "--mesh", "2", "--precision", "int1"], "--precision"),
        (["compile", "m.py", "-o", "p", "--mesh", "2", "--outputs", "a,,b"], "--outputs"),
        (["check", "p", "--batch", "3"], "--batch describes a MODEL"),
        (["verify", "p", "m.py", "--virtual", "--ranks", "gloo"], "not allowed with"),
        (["rules"], "required: COMMAND"),
        (["explain", "p"], "NODE|PARAM"),
        (["explain", "p", "fc", "--alternatives", "0"], "--alternatives: '0'"),
    ],
)
def test_usage_errors_are_2_and_name_the_option(arguments, said, capsys):
    assert exit_code(*arguments) == 2
    assert said in capsys.readouterr().err


def test_several_refusals_come_at_once():
    with pytest.raises(FxparError) as caught:
        refuse_unsupported({"--this": "it stays so", "--that": "it stays so"})
    assert str(caught.value).count("not supported") == 2


def test_errors_are_messages_not_tracebacks(tmp_path, model_file, capsys):
    (tmp_path / "junk").write_bytes(b"\x93junk")
    for arguments, said in (
        (("show", str(tmp_path / "none")), "cannot read the plan"),
        (("show", str(tmp_path / "junk")), "not a plan"),
        (("check", str(tmp_path / "junk")), "not a plan"),
        (("verify", str(tmp_path), "m.py"), "cannot read the plan"),
        (("explain", str(tmp_path / "none"), "fc"), "cannot read the plan"),
        (("compile", "nowhere.py", "-o", str(tmp_path / "p"), "--mesh", "2"), "cannot read the model nowhere.py"),
        (("compile", "m.py", "-o", str(tmp_path / "none" / "p"), "--mesh", "2"), "cannot write the plan"),
        (("compile", "m.py", "-o", str(tmp_path), "--mesh", "2"), "it is a folder"),
        (("compile", model_file("1 +"), "-o", str(tmp_path / "p"), "--mesh", "2"), "raised SyntaxError"),
    ):
        assert main(arguments) == 1
        shown = capsys.readouterr()
        assert shown.out == "" and said in shown.err, arguments
        assert "Traceback" not in shown.err and shown.err.startswith("fxpar: "), arguments
    assert run("show", str(tmp_path / "none")).returncode == 1


def test_tracebacks_and_json_errors_are_there_when_asked_for(tmp_path):
    plan = str(tmp_path / "none")
    assert "Traceback" in run("show", plan, "--traceback").stderr
    assert "Traceback" in run("show", plan, FXPAR_TRACEBACK="1").stderr
    assert "Traceback" not in run("show", plan, FXPAR_TRACEBACK="0").stderr
    answer = json.loads(run("show", plan, "--json").stdout)
    assert "cannot read the plan" in answer["error"]["what"]


def test_an_unforeseen_exception_is_short_and_says_how_to_see_more():
    try:
        raise KeyError("x\n" * 1000)
    except KeyError as error:
        said = str(unexpected_error(error))
    assert said.startswith("fxpar: unexpected KeyError: ") and "FXPAR_TRACEBACK=1" in said
    assert "test_main.py" in said and len(said) < 1000


def test_a_reader_that_goes_away_is_not_an_error_message():
    listing = subprocess.Popen(
        [sys.executable, "-u", "-m", "fxpar", "rules", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert listing.stdout is not None and listing.stderr is not None
    listing.stdout.close()
    said = listing.stderr.read()
    listing.stderr.close()
    assert listing.wait(timeout=120) == 1 and said == b""


def test_amounts_of_memory():
    assert memory("72GiB") == 72 * 2**30 and memory("80GB") == 80 * 10**9 and memory("1024") == 1024
    assert memory("0.5 MiB") == 2**19 and memory("1b") == 1


def test_hints_and_names_are_read():
    assert hint("a=b.*=tp:Shard(0)") == "a=b.*=tp:Shard(0)" and hint("plan.msgpack") == "plan.msgpack"
    assert names("loss, logits") == ("loss", "logits")


def test_rules_are_listed(capsys):
    assert main(["rules", "list", "aten.mm.*"]) == 0
    assert capsys.readouterr().out.startswith("aten.mm.default  m k, k n -> m n")
    assert main(["rules", "list", "--json"]) == 0
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert {"op": "aten.mm.default", "rule": "m k, k n -> m n", "random": False} in rules
    assert main(["rules", "list", "no.such.op"]) == 1
    assert "no op with a rule matches" in capsys.readouterr().err
