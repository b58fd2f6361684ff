"""Commands and questions, against a fake server."""

import io
from collections.abc import Iterator

import pytest
from fake_openai import FakeServer, running

from mizzen.chat.client import ChatClient, ChatError, normalized
from mizzen.chat.session import Session
from mizzen.chat.shell import read_lines


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with running(FakeServer()) as server:
        yield server


class Talk:
    def __init__(self, server: FakeServer, *, interactive: bool = False) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.client = ChatClient(server.url)
        self.session = Session(self.client, "fake-model", out=self.out, err=self.err, interactive=interactive)

    def said(self) -> str:
        text = self.out.getvalue()
        self.out.seek(0)
        self.out.truncate()
        return text


@pytest.fixture
def talk(server: FakeServer) -> Iterator[Talk]:
    talk = Talk(server)
    yield talk
    talk.client.close()


@pytest.fixture
def person(server: FakeServer) -> Iterator[Talk]:
    talk = Talk(server, interactive=True)
    yield talk
    talk.client.close()


def test_an_answer_is_streamed_and_remembered(server: FakeServer, talk: Talk) -> None:
    assert talk.session.handle("hello you") == "ok"
    assert talk.said() == "<hello><you>\n"
    talk.session.handle("and now")
    assert server.requests[1]["messages"] == [
        {"role": "user", "content": "hello you"},
        {"role": "assistant", "content": "<hello><you>"},
        {"role": "user", "content": "and now"},
    ]
    assert server.requests[0]["model"] == "fake-model"
    assert server.requests[0]["stream_options"] == {"include_usage": True}


def test_a_person_sees_the_figures_of_the_answer(person: Talk) -> None:
    person.session.handle("one two three")
    answer, note, end = person.said().split("\n")
    assert (answer, end) == ("<one><two><three>", "")
    assert note.startswith("[3 tokens, ")
    assert "tokens/s, first after 0." in note


def test_a_person_s_terminal_is_safe_from_control_characters(person: Talk, talk: Talk) -> None:
    person.session.handle("a\x1b]0;title\x07b")
    assert person.said().startswith("<a�]0;title�b>\n")
    talk.session.handle("a\x1b[31mb")
    assert talk.said() == "<a\x1b[31mb>\n"


def test_a_lone_surrogate_does_not_break_the_request(server: FakeServer, talk: Talk) -> None:
    assert talk.session.handle("a\udcffb") == "ok"
    assert server.requests[0]["messages"][0]["content"] == "a?b"


@pytest.mark.parametrize(
    ("question", "line"),
    [
        ("refuse", "error: HTTP 400: temperature must be at most 2\n"),
        ("busy", "error: HTTP 503: loading (try again in 7 s)\n"),
        ("plain refusal", "error: HTTP 502: <h1>Bad gateway</h1>\n"),
        ("break", "error: the engine restarted\n"),
        ("cut", "error: the connection was closed before the answer ended\n"),
        ("garbage", "error: the server sent an event that cannot be read: {nonsense\n"),
    ],
)
def test_a_failure_is_one_line_and_the_next_question_works(talk: Talk, question: str, line: str) -> None:
    assert talk.session.handle(question) == "failed"
    assert talk.err.getvalue() == line
    assert talk.session.handle("hello") == "ok"


def test_a_page_in_place_of_a_stream_is_named(talk: Talk) -> None:
    assert talk.session.handle("page") == "failed"
    assert "answers with text/html, not with a stream" in talk.err.getvalue()


def test_a_question_without_an_answer_is_forgotten_but_part_of_an_answer_is_kept(
    server: FakeServer, talk: Talk
) -> None:
    talk.session.handle("refuse")
    talk.session.handle("break")
    talk.session.handle("hello")
    assert server.requests[2]["messages"] == [
        {"role": "user", "content": "break"},
        {"role": "assistant", "content": "<break>"},
        {"role": "user", "content": "hello"},
    ]


def test_system_and_reset(server: FakeServer, talk: Talk) -> None:
    talk.session.handle("/system")
    assert talk.said() == "no system prompt\n"
    talk.session.handle("/system Be brief.")
    talk.session.handle("hello")
    talk.session.handle("/reset")
    talk.session.handle("again")
    assert server.requests[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "again"},
    ]
    talk.said()
    talk.session.handle("/system")
    assert talk.said() == "Be brief.\n"
    talk.session.handle("/system off")
    talk.session.handle("more")
    assert server.requests[2]["messages"][0] == {"role": "user", "content": "again"}


def test_set_puts_parameters_into_the_request(server: FakeServer, talk: Talk) -> None:
    for line in ("/set temperature 0.2", "/set max_tokens 50", "/set top_k 3", "/set top_k default"):
        assert talk.session.handle(line) == "ok"
    talk.session.handle("hello")
    sent = server.requests[0]
    assert (sent["temperature"], sent["max_tokens"], "top_k" in sent) == (0.2, 50, False)
    talk.said()
    talk.session.handle("/set")
    assert talk.said() == "temperature 0.2\ntop_p default\ntop_k default\nmax_tokens 50\nseed default\n"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set max_tokens 1.5", "max_tokens must be a whole number, or default"),
        ("/set temperature nan", "temperature must be a number, or default"),
        ("/set heat 3", "heat cannot be set; what can: temperature, top_p, top_k, max_tokens, seed"),
        ("/set temperature", "write /set NAME VALUE, such as /set temperature 0.2"),
        ("/rest", "/rest is not a command; /help lists them"),
    ],
)
def test_a_wrong_command_says_so(server: FakeServer, talk: Talk, line: str, complaint: str) -> None:
    assert talk.session.handle(line) == "failed"
    assert talk.err.getvalue() == f"error: {complaint}\n"
    assert server.requests == []


def test_help_and_quit(talk: Talk) -> None:
    talk.session.handle("/help")
    assert "/system TEXT" in talk.said()
    assert talk.session.handle("/quit") == "quit"


def test_a_pipe_answers_each_line_and_tells_of_failures_by_its_exit_code(server: FakeServer, talk: Talk) -> None:
    assert read_lines(talk.session, io.StringIO("one\n\ntwo\\\nlines\nlast")) == 0
    assert talk.said() == "<one>\n<two\nlines>\n<last>\n"
    assert read_lines(talk.session, io.StringIO("refuse\nhello\n")) == 1
    assert talk.said() == "<hello>\n"
    assert read_lines(talk.session, io.StringIO("/quit\nhello\n")) == 0
    assert talk.said() == ""


def test_a_server_that_is_gone_for_good_ends_the_shell(talk: Talk) -> None:
    talk.session.fate = lambda: "the engine ended"
    assert read_lines(talk.session, io.StringIO("refuse\nhello\n")) == 1
    assert talk.said() == ""
    assert talk.err.getvalue().endswith("error: the engine ended\n")


def test_models_are_listed_with_the_key_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with running(FakeServer(api_key="secret")) as server:
        client = ChatClient(f"{server.url}/v1/", "secret")
        assert client.models() == ["fake-model", "alias"]
        client.close()
        client = ChatClient(server.url)
        with pytest.raises(ChatError, match=r"^HTTP 401: the API key is wrong$"):
            client.models()
        client.close()


def test_a_server_that_does_not_listen_is_one_line() -> None:
    client = ChatClient("http://127.0.0.1:1", proxies=False)
    with pytest.raises(ChatError, match=r"^http://127.0.0.1:1 cannot be reached: "):
        client.models()
    client.close()


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(ChatError, match="cannot be used"):
        ChatClient("http://127.0.0.1:1", "ключ")


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:8000/", "http://localhost:8000/v1/"])
def test_urls_are_normalized(url: str) -> None:
    assert normalized(url) == "http://localhost:8000"
