"""`chat`, as a person uses it at a terminal and as a script does through a pipe."""

import json
import os
import re
import signal
import sys
import time

import pytest

import mlxserve
from tests.cli.test_generate import assert_refused, user
from tests.support.screen import Screen, Terminal

# Starts a process or a server per test, too long for `make check`.
pytestmark = pytest.mark.full

READY = "\x1b[?2004h"  # the editor waits for a line (and wants pasted text marked)
ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"


def assistant(text):
    return {"role": "assistant", "content": text}


def lines(*texts):
    return "".join(f"{text}\n" for text in texts).encode()


def scripted(model, *args, answers, after=""):
    """A program that is `mlxserve chat`, but whose model says `answers`: lists of pieces.

    `after`: code that runs when the pieces are out and before the answer ends. What the model was
    sent goes to stderr.
    """
    return f"""
import json, os, signal, sys, time
from mlxserve.llm import LLM
from mlxserve.types import Completion, Piece, Timings, Usage
answers = iter({answers!r})
def stream(self, messages, **sampling):
    print("SENT", json.dumps(messages), file=sys.stderr, flush=True)
    pieces = next(answers)
    for piece in pieces:
        yield Piece(piece)
    {after or "pass"}
    yield Piece("", Completion(text="".join(pieces), token_ids=(1,), finish_reason="stop",
                               usage=Usage(3, 4), timings=Timings()))
LLM.stream = stream
sys.argv = ["mlxserve", "chat", {str(model)!r}, *{args!r}]
from mlxserve.cli import main
main()
"""


def sent(stderr):
    return [json.JSONDecoder().raw_decode(part)[0] for part in stderr.split("SENT ")[1:]]


@pytest.fixture
def tiny(cli, tiny_model_dir):
    """`chat` with the tiny model, through pipes, at most 8 tokens an answer."""

    def run(*args, stdin=b"", **kwargs):
        return cli("chat", str(tiny_model_dir), "-n", "8", *args, stdin=stdin, **kwargs)

    return run


@pytest.fixture
def piped(cli, tiny_model_dir):
    """The scripted program, with its stdin a pipe."""

    def run(*args, stdin, **kwargs):
        source = scripted(tiny_model_dir, *args, **kwargs)
        return cli._run([sys.executable, "-c", source], stdin, {})

    return run


@pytest.fixture
def at_terminal(cli, tiny_model_dir):
    """The scripted program at a terminal, or the real one without `answers`."""
    opened = []

    def run(*args, rows=24, answers=None, **kwargs):
        from tests.cli.conftest import MLXSERVE

        command = [MLXSERVE, "chat", str(tiny_model_dir), *args]
        if answers is not None:
            source = scripted(tiny_model_dir, *args, answers=answers, **kwargs)
            command = [sys.executable, "-c", source]
        opened.append(Terminal(command, cli.env, rows))
        opened[-1].until("Ctrl-D leaves.")
        opened[-1].until(READY)
        return opened[-1]

    yield run
    for terminal in opened:
        terminal.close()


# Through a pipe.


def test_it_remembers_the_conversation(tiny, tiny_model_dir):
    done = tiny(stdin=lines("Hello", "And again"))
    with mlxserve.load(tiny_model_dir) as llm:
        first = llm.generate([user("Hello")], max_tokens=8).text
        messages = [user("Hello"), assistant(first), user("And again")]
        second = llm.generate(messages, max_tokens=8).text
    assert done.code == 0
    shown = [text if text.endswith("\n") else text + "\n" for text in (first, second) if text]
    assert done.stdout == "".join(shown)
    assert done.stderr.count("cut off after 8 tokens (--max-tokens).") == 2


def test_a_turn_starts_from_what_the_turns_before_left_in_the_cache(tiny, tiny_model_dir):
    questions = ["Tell me a long story about a fox and a dog, please. " * 2, "Go on."]
    done = tiny("--stats", stdin=lines(*questions, "/stats"))
    alone = tiny("--stats", "--no-prefix-cache", stdin=lines(*questions))
    with mlxserve.load(tiny_model_dir, prefix_cache=False) as llm:
        first = llm.generate([user(questions[0].strip())], max_tokens=8)
        messages = [user(questions[0].strip()), assistant(first.text), user(questions[1])]
        second = llm.generate(messages, max_tokens=8)
    assert done.code == 0
    assert done.stdout.split() == f"{first.text}\n{second.text}".split()
    assert done.stdout == alone.stdout
    turns = re.findall(r"^(?:last: )?(\d+) prompt tokens(?:, (\d+) cached)?", done.stderr, re.M)
    asked = [answer.usage.prompt_tokens for answer in (first, second)]
    assert [int(prompt) for prompt, _ in turns] == [*asked, asked[1]]
    assert turns[0][1] == ""
    # All that was asked and said, but for letters of the answer that weren't whole.
    assert asked[0] <= int(turns[1][1]) < asked[1]
    assert turns[2] == turns[1]
    assert "cached" not in alone.stderr


def test_sampling_and_system_are_generates(tiny, tiny_model_dir):
    how = ["--temp", "0.9", "--top-k", "40", "--seed", "7"]
    done = tiny("--system", "Be brief.", *how, stdin=lines("Hello"))
    with mlxserve.load(tiny_model_dir) as llm:
        messages = [{"role": "system", "content": "Be brief."}, user("Hello")]
        text = llm.generate(messages, max_tokens=8, temperature=0.9, top_k=40, seed=7).text
    assert done.stdout.rstrip("\n") == text.rstrip("\n")


def test_commands(piped):
    done = piped(
        answers=[["one"], ["two"], ["three"], ["four"]],
        stdin=lines(
            "a", "/system Rhyme.", "b", "/reset", "c", "/system -", "", " /d", "/quit", "e"
        ),
    )
    assert done.code == 0
    assert done.stdout == "one\ntwo\nthree\nfour\n"
    system = {"role": "system", "content": "Rhyme."}
    assert sent(done.stderr) == [
        [user("a")],
        [system, user("a"), assistant("one"), user("b")],
        [system, user("c")],
        [user("c"), assistant("three"), user("/d")],
    ]
    assert "a new conversation; the system prompt stays." in done.stderr


def test_help_and_stats(tiny):
    done = tiny("--stats", stdin=lines("/help", "/stats", "Hi", "/stats"))
    assert done.code == 0
    for name in ("/reset", "/system", "/save", "/load", "/stats", "/quit"):
        assert f"\n{name}" in f"\n{done.stderr}"
    assert "turns: 0\ncontext: 0 of 2048 tokens\n" in done.stderr
    assert re.search(r"turns: 1\ncontext: \d\d of 2048 tokens\nlast: 5 prompt", done.stderr)
    assert re.search(r"^5 prompt tokens.* 8 new.* \(length\)$", done.stderr, re.MULTILINE)


def test_quiet(tiny):
    done = tiny("--quiet", stdin=lines("Hi", "/reset"))
    assert (done.code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/rest", "unknown command /rest; there are /help, /reset, /system"),
        ("/usr/bin/python is what?", "A space before it makes it a message"),
        ("/save", "/save needs a file"),
        ("/load", "/load needs a file"),
        ("/load none.json", "none.json can't be read: No such file"),
        ("/reset all", "/reset takes nothing after it, and there is 'all'"),
    ],
)
def test_a_line_that_cannot_be_done(piped, line, words):
    done = piped(answers=[["one"]], stdin=lines(line, "a"))
    assert done.code == 2
    assert done.stdout == "one\n"  # the others are
    errors = [entry for entry in done.stderr.splitlines() if entry.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert sent(done.stderr) == [[user("a")]]


def test_save_and_load(piped, tmp_path):
    path = tmp_path / "chat with spaces.json"
    first = piped(
        "--system", "Rhyme.", answers=[["<thi", "nk>hm</think>", "\n\none"]],
        stdin=lines("a", f"/save {path}"),
    )  # fmt: skip
    assert first.code == 0
    saved = json.loads(path.read_text())
    assert saved[2] == {**assistant("one"), "reasoning_content": "hm"}
    second = piped(answers=[["two"]], stdin=lines(f"/load {path}", "b"))
    assert sent(second.stderr) == [[*saved, user("b")]]
    assert f"loaded 1 turns from {path}" in second.stderr


def test_thinking_goes_back_only_to_a_template_that_wants_it(tiny_model_dir):
    """The tiny model's template doesn't; the one here does."""
    from mlxserve.cli.conversation import Conversation
    from mlxserve.text.chat import ChatTemplate

    chat = Conversation()
    chat.add("a", "one", "hm", interrupted=False)
    with mlxserve.load(tiny_model_dir) as llm:
        assert "hm" not in llm.tokenizer.render_chat(chat.prompt("b"))
    source = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    assert ChatTemplate(source, {}).render(chat.prompt("b")) == "[|a][hm|one][|b]"


def test_tags_stay_in_a_pipe(piped):
    done = piped(answers=[["<think>hm</think>yes\x1b[31m"]], stdin=lines("a"))
    assert done.stdout == "<think>hm</think>yes\x1b[31m\n"


def test_longer_than_the_context(tiny):
    done = tiny(stdin=lines("Hi", "x" * 2048, "/reset", "Hello"))
    assert done.code == 2
    message = r"error: with this message the conversation has 20\d\d tokens, and this model can "
    assert re.search(message + r"take 2047 here; /save FILE keeps it, /reset starts", done.stderr)
    assert len(re.findall("cut off after 8", done.stderr)) == 2


def test_an_answer_that_fills_the_context(cli, tiny_model_dir):
    args = ("chat", str(tiny_model_dir), "-n", "5000", "--ignore-eos")
    done = cli(*args, stdin=lines("x" * 2030))
    assert done.code == 0
    assert "cut off: the context is full; /reset starts over." in done.stderr


def test_stdin_that_is_not_utf8(tiny):
    done = tiny(stdin=b"caf\xe9\n")
    assert done.code == 2
    assert "line 1 of stdin isn't valid UTF-8: byte 0xe9 at offset 3" in done.stderr


def test_bad_options(here, tmp_path):
    assert_refused(here("chat", "--temp", "-1"), "temperature is -1")
    assert_refused(here("chat", "--system", b"\xff"), "--system isn't valid UTF-8")
    assert_refused(here("chat", str(tmp_path / "none")), str(tmp_path / "none"))
    assert_refused(here("chat", "--kv-bits", "3"), "kv_bits is '3'")
    assert_refused(here("chat", "--prompt-cache", "none.st"), "none.st: No such file")
    both = ("--prompt-cache", "none.st", "--no-prefix-cache")
    assert_refused(here("chat", *both), "--prompt-cache needs what --no-prefix-cache turns off")


def test_model_without_a_template(cli, tmp_path):
    from tests.support.model_dir import write_model_dir

    write_model_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert_refused(cli("chat", str(tmp_path)), "has no chat template", "generate --raw")


def test_ctrl_c_ends_a_script(piped):
    done = piped(
        answers=[["partial"], ["never"]],
        after="os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
        stdin=lines("a", "b"),
    )
    assert (done.code, done.stdout) == (130, "partial\n")


# At a terminal.


def test_a_conversation_at_a_terminal(at_terminal):
    terminal = at_terminal(answers=[["Hello *you*"], ["Bye"]])
    terminal.send("Hi" + ENTER)
    shown = terminal.until(READY)
    assert "\x1b[3myou\x1b[0m" in shown
    terminal.send("Bye" + ENTER)
    assert "Bye" in terminal.until(READY)
    terminal.send(CTRL_D)
    assert terminal.wait() == 0
    assert sent(terminal.output)[1] == [user("Hi"), assistant("Hello *you*"), user("Bye")]


def test_what_is_typed_during_an_answer_counts_afterwards(at_terminal):
    terminal = at_terminal(answers=[["one"], ["two"]], after="time.sleep(2)")
    terminal.send("Hi" + ENTER)
    terminal.until("one")
    terminal.send("More" + ENTER)
    terminal.until("two")
    terminal.send(CTRL_D)
    assert terminal.wait() == 0
    assert sent(terminal.output)[1] == [user("Hi"), assistant("one"), user("More")]


def test_ctrl_c_stops_an_answer_and_not_the_program(at_terminal, cli, tmp_path):
    path = tmp_path / "chat.json"
    cli.env["MLXSERVE_KERNELS"] = "reference"  # else the context is full before Ctrl-C comes
    terminal = at_terminal("-n", "100000", "--ignore-eos", "--plain")
    terminal.send("Hi" + ENTER)
    time.sleep(1.5)
    terminal.send(CTRL_C)
    terminal.until("stopped; the model remembers what it said so far.")
    terminal.until(READY)
    terminal.send(f"/save {path}" + ENTER)
    terminal.until("saved 1 turns")
    terminal.until(READY)
    terminal.send("half a line" + CTRL_C)
    terminal.until("Ctrl-D or /quit leaves.")
    terminal.until(READY)
    terminal.send("/quit" + ENTER)
    assert terminal.wait() == 0
    question, answer = json.loads(path.read_text())
    assert question == user("Hi")
    assert answer["interrupted"] is True
    assert answer["content"]


def test_ctrl_c_before_the_first_word(at_terminal):
    terminal = at_terminal(answers=[[], ["x"]], after="time.sleep(0 if pieces else 60)")
    terminal.send("Hi" + ENTER)
    terminal.until("SENT")
    time.sleep(0.2)
    terminal.send(CTRL_C)
    terminal.until("the question is taken back.")
    terminal.until(READY)
    terminal.send("Again" + ENTER)
    terminal.until("x")
    assert sent(terminal.output)[1] == [user("Again")]


def test_sigterm_ends_it_and_gives_the_terminal_back(at_terminal):
    terminal = at_terminal(answers=[["<think>hm"]], after="time.sleep(60)")
    terminal.send("Hi" + ENTER)
    terminal.until("hm")
    time.sleep(0.2)  # until it waits for more
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.wait() == 143
    assert terminal.output.endswith("\x1b[0m\r\n")


def test_earlier_lines_come_back_in_the_next_chat(at_terminal, cli):
    terminal = at_terminal(answers=[["one"]])
    terminal.send("the first question" + ENTER)
    terminal.until("one")
    terminal.until(READY)
    terminal.send(CTRL_D)
    assert terminal.wait() == 0
    terminal = at_terminal(answers=[["two"]])
    terminal.send(UP + ENTER)
    terminal.until("two")
    assert sent(terminal.output) == [[user("the first question")]]
    history = os.path.join(cli.env["MLXSERVE_HOME"], "chat_history")
    assert os.stat(history).st_mode & 0o777 == 0o600


def test_lines_can_be_edited_and_be_several(at_terminal):
    terminal = at_terminal(answers=[["one"], ["two"]])
    terminal.send("firsd\x7ft" + ALT_ENTER + "second" + ENTER)
    terminal.until("one")
    terminal.until(READY)
    terminal.send("\x1b[200~pasted\nlines\x1b[201~" + ENTER)
    terminal.until("two")
    assert [messages[-1] for messages in sent(terminal.output)] == [
        user("first\nsecond"),
        user("pasted\nlines"),
    ]


def answer_on_screen(terminal):
    """What stands below the line with what the model was sent."""
    after = terminal.until(READY).split("SENT ", 1)[1].split("\n", 1)[1]
    screen = Screen()
    screen.feed(after.split("\x1b[?")[0])
    return screen


def test_thinking_is_dim_and_controls_are_gone(at_terminal):
    pieces = ["<th", "ink>let me see</thi", "nk>\n\nYes", "\x1b]0;owned\x07 \x1b[2Jsir\x9b1m"]
    terminal = at_terminal(answers=[pieces])
    terminal.send("Hi" + ENTER)
    terminal.until("Hi")
    screen = answer_on_screen(terminal)  # which refuses any control character it doesn't know
    assert screen.dimmed == "let me see"
    assert screen.text.startswith("let me see\n\nYes]0;owned [2Jsir1m\n")
    assert "think>" not in screen.text


@pytest.mark.parametrize("plain", [True, False])
def test_a_long_answer_is_all_there(at_terminal, plain):
    paragraphs = [f"**Paragraph {i}** " + f"word{i} " * 30 for i in range(40)]
    terminal = at_terminal(*["--plain"] * plain, answers=[["\n\n".join(paragraphs)]])
    terminal.send("Hi" + ENTER)
    terminal.until("Hi")
    text = "".join(answer_on_screen(terminal).text.split())  # lines are broken anywhere
    mark = "**" if plain else ""
    expected = [f"{mark}Paragraph{i}{mark}" + f"word{i}" * 30 for i in range(40)]
    assert text == "".join(expected)
