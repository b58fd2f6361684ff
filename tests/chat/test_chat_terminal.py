"""The whole program on a terminal: what Ctrl-C, the history and the end of the shell really do."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fake_openai import FakeServer, running
from terminal import Terminal

from mizzen.chat.own_engine import loading_line

CTRL_C, CTRL_D = "\x03", "\x04"
PROMPT = "\x1b[?2004h"  # what prompt_toolkit asks of the terminal as it begins to read
CLI = [sys.executable, "-m", "mizzen.cli", "chat"]
# The same program, with the fake in place of the real server.
WITH_FAKE_ENGINE = """
import sys
import mizzen.chat
import mizzen.cli
sys.modules["mizzen.chat.main"].SERVE = (sys.executable, *sys.argv[1:])
sys.exit(mizzen.cli.main(["chat", "--model", "fake-model"]))
"""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as server:
        yield server


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "NO_COLOR": "1"}


def fake_engine(*arguments: str) -> list[str]:
    script = Path(__file__).with_name("fake_openai.py")
    return [sys.executable, "-c", WITH_FAKE_ENGINE, str(script), *arguments]


def engine_pid(tmp_path: Path) -> int:
    """What the fake engine writes into its log."""
    return int(eventually(lambda: re.search(r"pid (\d+)", log(tmp_path)))[1])


def log(tmp_path: Path) -> str:
    return "".join(path.read_text() for path in tmp_path.glob("mizzen-engine-*.log"))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def eventually(condition: Callable[[], object], timeout_s: float = 20.0):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def test_ctrl_c_stops_the_answer_and_not_the_shell(server: FakeServer, environment: dict[str, str]) -> None:
    with Terminal([*CLI, "--url", server.url], environment) as terminal:
        terminal.expect("fake-model at http://")
        terminal.expect(PROMPT)
        terminal.send("slow\r")
        terminal.expect("tick tick ")
        terminal.send(CTRL_C)
        terminal.expect("[stopped]")
        assert server.disconnected.wait(10)
        terminal.expect(PROMPT)
        terminal.send("hello\r")
        terminal.expect("<hello>")
        terminal.expect(PROMPT)
        terminal.send(CTRL_D)
        assert terminal.wait() == 0
    asked, answered, _ = server.requests[1]["messages"]
    assert asked == {"role": "user", "content": "slow"}
    assert answered["role"] == "assistant"
    assert answered["content"].startswith("tick tick ")


def test_ctrl_c_before_the_first_token_forgets_the_question(server: FakeServer, environment: dict[str, str]) -> None:
    with Terminal([*CLI, "--url", server.url, "--model", "alias"], environment) as terminal:
        terminal.expect(PROMPT)
        terminal.send("silent\r")
        assert server.streaming.wait(10)
        terminal.send(CTRL_C)
        terminal.expect("[stopped; the question is forgotten]")
        assert server.disconnected.wait(10)
        terminal.expect(PROMPT)
        terminal.send("hello\r")
        terminal.expect("<hello>")
    assert server.requests[1]["messages"] == [{"role": "user", "content": "hello"}]
    assert server.requests[1]["model"] == "alias"


def test_the_history_suggests_what_was_asked_before(server: FakeServer, environment: dict[str, str]) -> None:
    with Terminal([*CLI, "--url", server.url], environment) as terminal:
        terminal.expect(PROMPT)
        terminal.send("a question\r")
        terminal.expect("<a><question>")
        terminal.expect(PROMPT)
        terminal.send(CTRL_D)
        assert terminal.wait() == 0
    with Terminal([*CLI, "--url", server.url], environment) as terminal:
        terminal.expect(PROMPT)
        terminal.send("a q")
        terminal.expect("uestion")
        terminal.send("\x1b[C\r")  # right: take it
        terminal.expect("<a><question>")


def test_sigterm_gives_the_terminal_back_as_it_was(server: FakeServer, environment: dict[str, str]) -> None:
    with Terminal([*CLI, "--url", server.url], environment) as terminal:
        terminal.expect(PROMPT)
        assert not terminal.echoes()
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.wait() == 128 + signal.SIGTERM
        assert terminal.echoes()


def test_ctrl_c_does_not_reach_an_engine_of_its_own(tmp_path: Path, environment: dict[str, str]) -> None:
    with Terminal(fake_engine(), environment) as terminal:
        terminal.expect("load 40%, 2 s: layer 12 of 30")
        terminal.expect("fake-model at an engine of its own")
        pid = engine_pid(tmp_path)
        assert os.getpgid(pid) == terminal.group
        terminal.expect(PROMPT)
        for _ in range(2):
            terminal.send("slow\r")
            terminal.expect("tick tick ")
            terminal.send(CTRL_C)
            terminal.expect("[stopped]")
            terminal.expect(PROMPT)
        os.killpg(terminal.group, signal.SIGINT)  # at the prompt, from elsewhere
        terminal.send("hello\r")
        terminal.expect("<hello>")
        terminal.expect(PROMPT)
        terminal.send("/quit\r")
        assert terminal.wait() == 0
        assert is_gone(pid)
        assert log(tmp_path) == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_shell_that_is_killed_takes_its_engine_along(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    with Terminal(fake_engine(), environment) as terminal:
        pid = engine_pid(tmp_path)
        terminal.expect(PROMPT)
        os.kill(terminal.pid, number)
        terminal.wait()
        eventually(lambda: is_gone(pid))


def test_ctrl_c_while_loading_ends_both(tmp_path: Path, environment: dict[str, str]) -> None:
    with Terminal(fake_engine("--load-forever"), environment) as terminal:
        terminal.expect("load 40%")
        pid = engine_pid(tmp_path)
        terminal.send(CTRL_C)
        assert terminal.wait() == 130
        assert is_gone(pid)
        assert "Traceback" not in terminal.shown


def test_an_engine_that_cannot_start_is_named_with_its_last_line_and_log(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with Terminal(fake_engine("--fail"), environment) as terminal:
        assert terminal.wait() == 78
        (path,) = tmp_path.glob("mizzen-engine-*.log")
        said = f"mizzen: the engine ended with exit code 78; its log is {path}"
        assert said in terminal.shown.replace("\r\n", "")
        assert "MIZZEN_MODEL: there is no such folder" in terminal.shown


def test_an_engine_that_dies_ends_the_shell(environment: dict[str, str]) -> None:
    with Terminal(fake_engine(), environment) as terminal:
        terminal.expect(PROMPT)
        terminal.send("die\r")
        terminal.expect("the engine ended with exit code 3; its log is ")
        assert terminal.wait() == 1


@pytest.mark.slow
@pytest.mark.parametrize("end", ["quit", "kill -9"])
def test_the_real_server_answers_and_ends_with_the_shell(smollm2: Path, environment: dict[str, str], end: str) -> None:
    command = [*CLI, "--model", str(smollm2), "--kv-cache-bytes", "64MiB", "--threads", "1"]
    with Terminal(command, environment | {"MIZZEN_API_KEYS": "sesame"}) as terminal:
        terminal.expect("smollm2-135m-instruct at an engine of its own", timeout_s=100)
        processes = psutil.Process(terminal.pid).children(recursive=True)
        commands = [each.cmdline() for each in processes]
        run_dir = next(words[words.index("--run-dir") + 1] for words in commands if "--run-dir" in words)
        terminal.expect(PROMPT)
        for line in ("/set temperature 0", "/set max_tokens 1000"):
            terminal.send(f"{line}\r")
            terminal.expect(PROMPT)
        terminal.send("What is the capital of France?\r")
        terminal.expect("Paris")
        terminal.expect("tokens/s, first after")
        terminal.expect(PROMPT)
        terminal.send("Write a very long story.\r")
        terminal.expect(", ")
        if end == "quit":
            terminal.send(CTRL_C)
            terminal.expect("[stopped]")
            terminal.expect(PROMPT)
            assert all(each.is_running() for each in processes)
            terminal.send("/quit\r")
            assert terminal.wait() == 0
        else:
            os.kill(terminal.pid, signal.SIGKILL)
        eventually(lambda: all(is_gone(each.pid) for each in processes))
        eventually(lambda: not Path(run_dir).exists())


def chat(arguments: list[str], questions: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments], input=questions, capture_output=True, text=True, check=False, env=environment, timeout=60
    )


def test_a_pipe_gets_answers_only(server: FakeServer, environment: dict[str, str]) -> None:
    done = chat(["--url", server.url], "hello\n/set seed 3\nyou two\n", environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "<hello>\n<you><two>\n", "")
    done = chat(["--url", server.url], "refuse\n", environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: HTTP 400: temperature must be at most 2\n"


def test_what_is_wrong_before_the_first_question_is_one_line(environment: dict[str, str]) -> None:
    done = chat(["--url", "http://127.0.0.1:1"], "", environment)
    assert done.returncode == 1
    assert re.fullmatch(r"mizzen: http://127.0.0.1:1 cannot be reached: .*\n", done.stderr)
    done = chat(["--url", "http://127.0.0.1:1", "--page-size", "4"], "", environment)
    assert done.returncode == 2
    assert "--url and --page-size exclude each other" in done.stderr
    done = chat(["--page-size", "4"], "", environment)
    assert done.returncode == 78
    assert re.fullmatch(r"mizzen: MIZZEN_MODEL is not set: .*\n", done.stderr)


def test_a_reader_that_leaves_is_no_traceback(server: FakeServer, environment: dict[str, str]) -> None:
    program = subprocess.Popen([*CLI, "--url", server.url], stdin=-1, stdout=-1, stderr=-1, text=True, env=environment)
    with program:
        assert program.stdout is not None
        program.stdout.close()
        _, said = program.communicate("hello\n", timeout=60)
    assert (program.returncode, said) == (1, "")


def test_the_shell_does_not_load_torch() -> None:
    program = "import sys, mizzen.chat; sys.exit('torch' in sys.modules or 'prompt_toolkit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("health", "line"),
    [
        (
            {"phase": "load", "phase_s": 12.4, "fraction": 0.4, "detail": "layer 12 of 30"},
            "load 40%, 12 s: layer 12 of 30",
        ),
        ({"phase": "profile", "phase_s": 1.0, "fraction": None, "detail": ""}, "profile, 1 s"),
    ],
)
def test_the_loading_line_says_the_phase(health: dict[str, object], line: str) -> None:
    assert loading_line(health) == line
