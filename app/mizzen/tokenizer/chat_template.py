"""Messages become one text by the model's own template, in a sandbox: whatever it does, the worst is a 400."""

import datetime
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from mizzen.errors import ConfigError, InvalidRequest
from mizzen.ipc.messages import ChatPrompt
from mizzen.tokenizer.hf import HFTokenizer

_RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message"})


class ChatTemplate:
    """A model's templates, compiled. ``templates``: by name, of which "default" and "tool_use" have a meaning.

    ``special_tokens`` ("bos_token" and so on) are variables of the template; ``setting`` names what to change if one
    does not compile (ConfigError).
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], *, setting: str) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, _Template] = {}
        for name, source in templates.items():
            try:
                self._templates[name] = _Template(environment, source)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"the chat template '{name}' does not compile (line {error.lineno}): {error.message}",
                    setting=setting,
                ) from error

    def render(self, prompt: ChatPrompt) -> str:
        """The text to be encoded as it is, without special tokens of its own. Raises InvalidRequest."""
        kwargs = prompt.template_kwargs
        if clash := sorted(_RESERVED & kwargs.keys()):
            raise InvalidRequest(f"'chat_template_kwargs' may not set '{clash[0]}'", param="chat_template_kwargs")
        if not prompt.messages:
            raise InvalidRequest("'messages' is empty", param="messages")
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise InvalidRequest(
                "'continue_final_message' and 'add_generation_prompt' exclude each other",
                param="continue_final_message",
            )
        template = self._select(bool(kwargs.get("tools")))
        messages = [template.adapt(message) for message in prompt.messages]
        if not prompt.continue_final_message:
            return self._run(template, messages, prompt)
        # A marker at the end of the last message shows where its text lies in the result, whatever the template
        # does to white space or writes after it.
        marker = f"<{secrets.token_hex(16)}>"
        messages[-1] = _with_marker(messages[-1], marker)
        text, found, _ = self._run(template, messages, prompt).rpartition(marker)
        if not found:
            raise InvalidRequest(
                "the chat template leaves the final message out: it cannot be continued", param="continue_final_message"
            )
        return text

    def _select(self, has_tools: bool) -> "_Template":
        template = self._templates.get("tool_use") if has_tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequest(
                "The model has no chat template: use /v1/completions, or set MIZZEN_CHAT_TEMPLATE", param="messages"
            )
        return template

    def _run(self, template: "_Template", messages: list[dict[str, Any]], prompt: ChatPrompt) -> str:
        variables: dict[str, Any] = {
            **self._special_tokens,
            **prompt.template_kwargs,
            "messages": messages,
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        try:
            return template.compiled.render(variables)
        except Exception as error:  # a template is a program: it may raise anything, and only 400 fits
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error


class _Template:
    """One compiled template and what it expects of a message."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        tree = environment.parse(source)
        loops_over_content = _loops_over_content(tree)
        self._takes_parts = loops_over_content
        self._takes_text = not loops_over_content or any(test.name == "string" for test in tree.find_all(nodes.Test))
        self._knows_developer = any("developer" in str(const.value) for const in tree.find_all(nodes.Const))
        self.compiled = environment.from_string(tree)

    def adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message in the form this template wants. Raises InvalidRequest for what it cannot be."""
        adapted = dict(message)
        if adapted.get("role") == "developer" and not self._knows_developer:
            adapted["role"] = "system"
        adapted["content"] = self._adapt_content(adapted.get("content"))
        if adapted.get("tool_calls"):
            adapted["tool_calls"] = [_adapt_tool_call(call) for call in adapted["tool_calls"]]
        return adapted

    def _adapt_content(self, content: Any) -> str | list[dict[str, Any]]:
        if content is None:
            content = ""
        if isinstance(content, str):
            return content if self._takes_text else [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise InvalidRequest("a message's content must be a string or a list of parts", param="messages")
        texts = [_part_text(part) for part in content]
        if self._takes_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def load_chat_template(tokenizer: HFTokenizer, custom: str | None) -> ChatTemplate:
    """The model's templates, or ``custom``: a template's text, or the path of a file with it."""
    if custom is None:
        return ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens, setting="MIZZEN_CHAT_TEMPLATE")
    source = custom
    if "{%" not in custom and "{{" not in custom:
        try:
            source = Path(custom).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"'{custom}' is neither a template's text nor a readable file: {error}", setting="MIZZEN_CHAT_TEMPLATE"
            ) from error
    return ChatTemplate({"default": source}, tokenizer.special_tokens, setting="MIZZEN_CHAT_TEMPLATE")


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidRequest(f"a content part of type '{kind}' is not supported: only text is", param="messages")


def _adapt_tool_call(call: Any) -> Any:
    """OpenAI sends arguments as JSON text; templates write them with tojson, so they want the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise InvalidRequest(f"a tool call's arguments are not JSON: {error}", param="messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _with_marker(message: dict[str, Any], marker: str) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + marker}
    if not content:
        return {**message, "content": [{"type": "text", "text": marker}]}
    return {**message, "content": [*content[:-1], {"type": "text", "text": content[-1]["text"] + marker}]}


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template takes content as a list of parts: it loops over ``message.content``, directly or by name."""
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """What templates on the Hugging Face hub are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own: no HTML escapes, keys in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
